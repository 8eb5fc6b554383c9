"""Pure ASGI middleware and small objects that keep one client from harming the others."""
