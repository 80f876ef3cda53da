"""The performance model: from hardware and model shape to seconds and bytes."""
