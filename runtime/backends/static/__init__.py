"""The backend of static graphs."""
