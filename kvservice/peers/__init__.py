"""Other nodes: who they are, who owns what, and bytes between them."""
