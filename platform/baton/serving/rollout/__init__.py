"""Another configuration or version, replica by replica, and back if it ails."""
