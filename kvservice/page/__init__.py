"""The page at ``/``: three files without a build step, and what they ask that no other document says."""
