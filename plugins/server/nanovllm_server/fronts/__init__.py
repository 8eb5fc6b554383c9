"""Several front processes of one server, and the process that starts and watches them."""
