"""What the service does with the reports of servers: changes of the state, and views of the use of GPUs."""
