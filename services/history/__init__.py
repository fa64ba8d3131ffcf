"""The event log: numbers events at commit, keeps one ending per execution, gives every reader the same order."""
