"""What an operator should know of the settings of this process before money, warmth or safety is lost. Pure."""

from __future__ import annotations

from services.chassis.settings import PREFIX
from services.pool.control.gates import Policy
from services.pool.settings import PoolSettings

# A sandbox waits this long for nobody after a Stop before it is dearer than the cold start that it saves.
_LONGEST_WINDOW = 3600.0


def warnings(settings: PoolSettings) -> tuple[str, ...]:
    """One sentence for each, with the name of the variable."""
    found = []
    if settings.permission is Policy.ALLOW:
        found.append(
            f"{PREFIX}DEFAULT_PERMISSION=allow: an agent may do whatever it asks for where the spec does not say"
        )
    windows = {f"{name.upper()}_WARM_WINDOW": settings.warm_window(name) for name in settings.providers}
    for variable, window in {**windows, "STOP_WINDOW": settings.stop_window}.items():
        if window > _LONGEST_WINDOW:
            found.append(f"{PREFIX}{variable}={window:g}: idle sandboxes run, and cost, for hours")
    for name in settings.providers:
        if settings.warm_window(name) == 0:
            found.append(f"{PREFIX}{name.upper()}_WARM_WINDOW is 0: no turn on {name} is a warm one")
    return tuple(found)
