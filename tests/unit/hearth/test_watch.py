"""The client's half of a subscription: how long it bears silence."""

from __future__ import annotations

from hearth.watch import SILENCE_SECONDS
from services.relay.settings import RelaySettings


def test_r24_the_server_speaks_three_times_before_the_client_gives_up() -> None:
    heartbeat = RelaySettings.model_fields["relay_heartbeat"].default
    assert heartbeat * 3 <= SILENCE_SECONDS
