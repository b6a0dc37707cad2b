"""Who may call, for which tenants, how often, and how much a tenant may keep. Data and rules; no server of its own."""
