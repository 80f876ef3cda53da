"""Changes of the configuration or version, replica by replica, with rollback."""
