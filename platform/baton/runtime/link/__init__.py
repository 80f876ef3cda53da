"""The fleet link: requests from coordinators to replicas, and one frame per engine step back."""
