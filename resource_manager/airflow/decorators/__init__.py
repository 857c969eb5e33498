"""TaskFlow decorator `@task.gpu`."""
