"""REST service of the manager: one Flask blueprint with the routes, the console and the roles."""
