-- Minted here and nowhere else: instances are labelled with it, so two databases never take each other's instances.
CREATE TABLE sandbox.deployment (
    only_one      boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    deployment_id uuid NOT NULL DEFAULT gen_random_uuid(),
    created_at    timestamptz NOT NULL DEFAULT now()
);
INSERT INTO sandbox.deployment DEFAULT VALUES;

-- What is known of the claims of a session. Outlives its sandboxes, so that a late call under an old claim is refused.
CREATE TABLE sandbox.sessions (
    project        text NOT NULL,
    session        text NOT NULL,
    claim_epoch    bigint NOT NULL DEFAULT 0,
    claim_attempt  bigint NOT NULL DEFAULT 0,
    holder         uuid,
    closed_epoch   bigint NOT NULL DEFAULT 0,
    closed_attempt bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (project, session)
);

CREATE TABLE sandbox.sandboxes (
    sandbox_id         uuid PRIMARY KEY,
    project            text,
    session            text,
    provider           text NOT NULL,
    provider_id        text NOT NULL DEFAULT '',
    agent              text NOT NULL DEFAULT '',
    fingerprint        text NOT NULL DEFAULT '',
    daemon_fingerprint text NOT NULL DEFAULT '',
    desired            text NOT NULL CHECK (desired IN ('RUNNING', 'STOPPED', 'GONE')),
    observed           text NOT NULL CHECK (observed IN
        ('CREATING', 'STARTING', 'RUNNING', 'STOPPING', 'STOPPED', 'DELETING', 'GONE', 'ERROR', 'UNKNOWN')),
    tenure             text NOT NULL CHECK (tenure IN ('ACTIVE', 'PARKED', 'FREE', 'ORPHAN')),
    holder             uuid,
    -- The last claim that held it; it is held now only where tenure is ACTIVE or PARKED.
    claim_epoch        bigint NOT NULL DEFAULT 0,
    claim_attempt      bigint NOT NULL DEFAULT 0,
    how                text CHECK (how IN ('ATTACHED', 'RESTARTED', 'CREATED')),
    -- The daemon's token and address. No token: unknown, only a restart of the daemon gives one.
    token              text,
    endpoint_url       text NOT NULL DEFAULT '',
    endpoint_headers   jsonb NOT NULL DEFAULT '{}',
    version            bigint NOT NULL DEFAULT 1,
    worker             uuid,
    deadline           timestamptz,
    renewals           bigint NOT NULL DEFAULT 0,
    created_at         timestamptz NOT NULL DEFAULT now(),
    changed_at         timestamptz NOT NULL DEFAULT now(),
    used_at            timestamptz NOT NULL DEFAULT now(),
    refreshed_at       timestamptz NOT NULL DEFAULT now(),
    last_error         text NOT NULL DEFAULT '',
    -- What it costs now. An orphan may be running; one that is stopping still is.
    tier               text NOT NULL GENERATED ALWAYS AS (
        CASE WHEN observed = 'GONE' THEN 'gone'
             WHEN tenure = 'ORPHAN' THEN 'orphan'
             WHEN observed = 'STOPPED' THEN 'stopped'
             WHEN tenure = 'PARKED' THEN 'parked'
             ELSE 'active' END) STORED,
    tier_since         timestamptz NOT NULL DEFAULT now(),
    active_seconds     double precision NOT NULL DEFAULT 0,
    parked_seconds     double precision NOT NULL DEFAULT 0,
    stopped_seconds    double precision NOT NULL DEFAULT 0,
    orphan_seconds     double precision NOT NULL DEFAULT 0,
    CHECK ((project IS NULL) = (session IS NULL)),
    CHECK ((worker IS NULL) = (deadline IS NULL)),
    CHECK ((holder IS NOT NULL) = (tenure IN ('ACTIVE', 'PARKED')))
);

-- A session has one sandbox; what cannot be shown stopped leaves the session as an orphan.
CREATE UNIQUE INDEX sandbox_of_session ON sandbox.sandboxes (project, session)
    WHERE tenure <> 'ORPHAN' AND observed <> 'GONE';
CREATE INDEX sandboxes_parked ON sandbox.sandboxes (provider, used_at) WHERE tenure = 'PARKED';
CREATE INDEX sandboxes_not_gone ON sandbox.sandboxes (provider) WHERE observed <> 'GONE';
CREATE INDEX sandboxes_by_age ON sandbox.sandboxes (created_at, sandbox_id);
CREATE INDEX sandboxes_by_session ON sandbox.sandboxes (project, session, created_at, sandbox_id);

-- One row for each sandbox that may be kept running between turns. To count rows instead would race.
CREATE TABLE sandbox.warm_slots (
    provider   text NOT NULL,
    number     integer NOT NULL CHECK (number >= 1),
    sandbox_id uuid UNIQUE REFERENCES sandbox.sandboxes (sandbox_id),
    PRIMARY KEY (provider, number)
);

-- Usage of sandboxes whose rows were removed long after they were gone.
CREATE TABLE sandbox.usage_of_removed (
    project  text NOT NULL,
    provider text NOT NULL,
    tier     text NOT NULL CHECK (tier IN ('active', 'parked', 'stopped', 'orphan')),
    seconds  double precision NOT NULL,
    PRIMARY KEY (project, provider, tier)
);
