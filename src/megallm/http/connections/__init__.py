"""Sockets and HTTP: one listening socket, its connections, and the app behind them."""
