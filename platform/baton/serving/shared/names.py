"""What the parts of the Serve application are called."""

from __future__ import annotations

APP = "baton"
INGRESS = "ingress"
CONTROLLER = "controller"
