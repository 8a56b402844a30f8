"""One task per client: sockets, frames and sessions."""
