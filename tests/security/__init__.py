"""Who may do what: every RPC from the outside."""
