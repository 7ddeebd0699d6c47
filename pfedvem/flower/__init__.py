"""The same algorithms at real sites: a ServerApp and a ClientApp of Flower that run any method.

Needs ``pip install "pfedvem[flower]"``.
"""

from pfedvem.flower.client import client_app
from pfedvem.flower.server import serve, server_app
from pfedvem.flower.settings import Settings
from pfedvem.flower.strategy import FederatedStrategy

__all__ = ["FederatedStrategy", "Settings", "client_app", "serve", "server_app"]
