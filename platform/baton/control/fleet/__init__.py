"""What a coordinator knows of replicas: facts, load, caches, health."""
