-- What a sandbox may reach now. It left the fingerprint: where the provider can, another policy is set, not another
-- sandbox made. '?' is written before a change, so that nobody takes an unfinished one for either policy.
ALTER TABLE sandbox.sandboxes ADD COLUMN network text NOT NULL DEFAULT '?';

-- A provider of which suspiciously many instances were unknown. The row stands until a person has looked, so that
-- neither a restart nor a few more known instances lets the reconciler delete them after all.
CREATE TABLE sandbox.breakers (
    provider   text PRIMARY KEY,
    unknown    bigint NOT NULL,
    tripped_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX sandboxes_worked_on ON sandbox.sandboxes (worker) WHERE worker IS NOT NULL;
