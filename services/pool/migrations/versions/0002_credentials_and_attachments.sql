-- One for all credentials: a generation never comes back, also not after a credential was deleted and stored again.
CREATE SEQUENCE pool.credential_generation AS bigint;

-- Values that agents are given. Without HEARTH_SECRET_KEY nobody can read them.
CREATE TABLE pool.credential (
    project text NOT NULL,
    name text NOT NULL,
    -- The first grows whenever it is stored, the second only with another value.
    generation bigint NOT NULL,
    value_generation bigint NOT NULL CHECK (value_generation <= generation),
    sealed bytea NOT NULL,
    expires_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (project, name)
);

-- Requests that concern a project and no session of it, so that a late retry changes nothing.
CREATE TABLE pool.project_request (
    project text NOT NULL,
    request_id text NOT NULL,
    method text NOT NULL,
    -- Of the request without its id; keyed where the request holds a secret, whose plain digest could be guessed.
    fingerprint bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (project, request_id)
);

-- Files for messages, kept as long as their session.
CREATE TABLE pool.attachment (
    attachment_id uuid PRIMARY KEY,
    project text NOT NULL,
    session text NOT NULL,
    name text NOT NULL,
    media_type text NOT NULL,
    -- SHA-256 of the content.
    digest bytea NOT NULL,
    content bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (project, session) REFERENCES pool.session
);

-- Most files are compressed already.
ALTER TABLE pool.attachment ALTER COLUMN content SET STORAGE EXTERNAL;
CREATE INDEX attachment_by_session ON pool.attachment (project, session);

ALTER TABLE pool.request ADD COLUMN attachment_id uuid;
