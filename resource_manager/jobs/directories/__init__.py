"""Detached jobs with a directory each: what acts on them where they are, which is sent to servers as it is.

Standard library only. `<root>/<key>/` holds `log`, `group` (the process group), `exit_code` once the job has
ended, `lock`, and `preempted` once the job was told that its lease is taken. `<root>/told/<key>`, which the
job is not told of, is then dated to the end of its grace. `<root>/kept/<key without its lease's fencing
token>/` is the job's own: it stays for the next lease of the same id, until a job has succeeded.
`<root>/ended/<key>` is the tombstone of a job that was stopped, kept for a day: it is not started again.
`<root>/begun/<key>` says that the job was started, also once somebody has removed its directory.
`<root>/mark` has a number that only this folder has, so that nobody takes another for it.
Every process of the job inherits a flock on `lock`, so the lock is free only when the job is gone, even if
some of its processes were killed or process ids were reused. A process that closed the inherited
descriptor, as Python's subprocesses do, is found by `GPU_JOB_LOCK` in its environment when the job is
stopped. A job may put anything in place of these files: what is read is a bounded regular file, or none.
"""
