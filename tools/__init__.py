"""What this project is kept with: no part of an installation."""
