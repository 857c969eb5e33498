/* Grants of Slurm through its C API, without starting a process; see peers.py, which builds and calls it.
 *
 * For each line of standard input: allocate 2 GPUs and 16 CPUs of one server, wait for them if need be,
 * complete the job, and answer with a line. The configuration is that of SLURM_CONF. */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdio.h>
#include <unistd.h>

#define WAIT_S 60

static int pair(void) {
	job_desc_msg_t request;
	resource_allocation_response_msg_t *granted;
	uint32_t job_id;

	slurm_init_job_desc_msg(&request);
	request.name = "pair";
	request.user_id = getuid();
	request.group_id = getgid();
	request.min_nodes = request.max_nodes = 1;
	request.num_tasks = 1;
	request.cpus_per_task = request.min_cpus = 16;
	request.tres_per_node = "gres:gpu:2";
	request.work_dir = "/tmp";
	granted = slurm_allocate_resources_blocking(&request, WAIT_S, NULL);
	if (granted == NULL)
		return -1;
	job_id = granted->job_id;
	slurm_free_resource_allocation_response_msg(granted);
	return slurm_complete_job(job_id, 0);
}

int main(void) {
	char line[16];

	slurm_init(NULL);
	while (fgets(line, sizeof line, stdin) != NULL) {
		if (pair() != SLURM_SUCCESS) {
			slurm_perror("slurm_pairs");
			return 1;
		}
		puts("done");
		fflush(stdout);
	}
	return 0;
}
