"""What drafts gain where their cache comes back with a retracted request."""
