"""The HTTP APIs: a request's body becomes a request of the service, its events become bytes."""
