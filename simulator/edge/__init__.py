"""Job graphs on cloud hosts, base stations and user devices: planning and scoring."""
