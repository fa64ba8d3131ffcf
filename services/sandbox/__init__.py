"""The sandbox service: provider instances, the claims on them, and the agent daemon that runs inside."""
