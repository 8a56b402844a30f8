"""Several machines behind HAProxy: the file of nodes, the file for HAProxy, and the socket of a running one."""
