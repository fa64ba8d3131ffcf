"""A web application on Hearth: messages in by POST, the conversation out as server-sent events."""
