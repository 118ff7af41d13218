"""Study 00: what this GPU can do."""
