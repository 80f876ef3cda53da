"""The former path of `app_builder`: manifests name it until the next release."""

from baton.serving.app_builder import application

__all__ = ["application"]
