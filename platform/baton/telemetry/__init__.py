"""What baton says of itself: logs and the stories of requests."""
