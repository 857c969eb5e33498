"""Sign-on of people by OpenID Connect: a provider says who they are, the cluster what its groups may do."""
