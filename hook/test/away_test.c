// SPDX-License-Identifier: Apache-2.0
/*
 * away_test.c: calls that wait for memory, and how each of these waits ends. Run
 * with the shim preloaded; one case per process, "" lists them. The process is the
 * tenant, and a thread of it the scheduler.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EVENTUALLY_MS PATIENCE_MS
#include "tenant.h"

#define GPU (96 * MIB)
#define LARGE (40 * MIB)

static CUstream own; /* not the one that the rest works in */

static uint64_t grace_ms; /* 0: the usual one */

static void open_tenant(void)
{
	struct swapper_config c = { .gpu = GPU, .arena = 16 * MIB, .quantum_ms = 30, .grace_ms = grace_ms };

	schedule(c);
	tenant_open();
	CU(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
	work(1); /* holds the GPU afterwards */
}

static struct buffer filled(uint64_t seed)
{
	struct buffer b = { .bytes = LARGE };

	CU(cuMemAlloc_v2(&b.p, b.bytes));
	run_fill(&b, seed, NULL);
	CU(cuCtxSynchronize());
	return b;
}

/* The tenant has no grant afterwards, and gets none. */
static void take_the_gpu(void)
{
	swapper_withhold(true);
	EVENTUALLY(swapper_seen().holder == 0);
}

/* Except so many bytes, which stay. */
static void take_away_all_but(uint64_t fixed)
{
	take_the_gpu();
	swapper_room(1);
	EVENTUALLY(swapper_seen().resident <= fixed + 2 * MIB);
}

static void take_memory_away(void)
{
	take_away_all_but(0);
}

/* The scheduler's side, while a call of the main thread waits. */
static void *beside(void *run)
{
	((void (*)(void))run)();
	return NULL;
}

static pthread_t start(void (*run)(void))
{
	pthread_t t;

	CHECK(pthread_create(&t, NULL, beside, (void *)run) == 0);
	return t;
}

/* ---- the scheduler goes ---- */

/* Once more is reserved than there is room for, who asked for it waits for the room. */
static void stop_when_somebody_waits(void)
{
	EVENTUALLY(swapper_seen().reserved >= 2 * LARGE);
	nap_ms(100);
	swapper_stop();
}

static CUresult create(CUdeviceptr *p, size_t bytes)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };

	return cuMemCreate(p, bytes, &prop, 0);
}

/* From then on the GPU's own memory is the limit, and its driver the judge. */
static void without_a_scheduler(CUresult (*allocate)(CUdeviceptr *, size_t))
{
	CUdeviceptr p;
	pthread_t t;

	open_tenant();
	swapper_room(LARGE);
	t = start(stop_when_somebody_waits);
	CHECK(allocate(&p, 2 * LARGE) == CUDA_SUCCESS);
	pthread_join(t, NULL);
	CHECK(allocate(&p, 2 * LARGE) == CUDA_ERROR_OUT_OF_MEMORY);
}

static void an_allocation_outlives_the_scheduler(void) { without_a_scheduler(cuMemAlloc_v2); }
static void a_handle_outlives_the_scheduler(void) { without_a_scheduler(create); }

/* The system has no thread to map a segment of the arena when that comes. Later it has. */
static void an_arena_is_mapped_later(void)
{
	struct swapper_config c = { .gpu = GPU, .quantum_ms = 30 };
	pthread_attr_t usual, none;
	struct buffer b;

	schedule(c);
	tenant_open();
	work(1);
	b = filled(5);
	CHECK(pthread_getattr_default_np(&usual) == 0 && pthread_attr_init(&none) == 0);
	CHECK(pthread_attr_setstacksize(&none, (size_t)1 << 50) == 0 && pthread_setattr_default_np(&none) == 0);
	swapper_arena(64 * MIB);
	nap_ms(500);
	CHECK(pthread_setattr_default_np(&usual) == 0);
	take_memory_away();
	swapper_room(0);
	swapper_withhold(false);
	verify(&b);
}

/* ---- work without a grant ---- */

/* A latency tenant's work begins before its grant; what it uses is freed after it. */
static void a_free_waits_for_work_that_went_ahead(void)
{
	uint64_t ns = 300000000, zero = 0;
	void *params[] = { &ns, &zero };
	struct buffer b;

	open_tenant();
	b = filled(1);
	take_the_gpu();
	swapper_standing(true);
	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	run_fill(&b, 2, NULL);
	CHECK(swapper_seen().holder == 0);
	CU(cuMemFree_v2(b.p));
	CHECK(cuStreamQuery(NULL) == CUDA_SUCCESS);
	swapper_standing(false);
	swapper_withhold(false);
	swapper_end();
}

/* ---- who leaves the wait for memory ---- */

static sigjmp_buf back;
static pthread_t waiter; /* the main thread */
static atomic_bool granted;

static void jump(int sig)
{
	(void)sig;
	siglongjmp(back, 1);
}

/* Sends the signal when the main thread waits for memory. */
static void interrupt(void)
{
	EVENTUALLY(swapper_seen().wants > 0);
	nap_ms(100);
	CHECK(pthread_kill(waiter, SIGUSR1) == 0); /* it may have it blocked just now, and no other thread may jump */
}

static void grant_late(void)
{
	EVENTUALLY(swapper_seen().wants > 0);
	nap_ms(200);
	granted = true;
	swapper_withhold(false);
}

static void who_jumped_out_waits_for_a_grant(void)
{
	struct buffer a, b;
	pthread_t t;
	CUgraph g;

	open_tenant();
	waiter = pthread_self();
	CHECK(signal(SIGUSR1, jump) != SIG_ERR);
	a = filled(1);
	b = filled(2);
	take_memory_away();
	CU(cuStreamBeginCapture_v2(own, CU_STREAM_CAPTURE_MODE_RELAXED));
	t = start(interrupt);
	if (!sigsetjmp(back, 1)) {
		cuMemcpyDtoDAsync_v2(b.p, a.p, a.bytes, own);
		CHECK(!"the copy waits for its memory");
	}
	pthread_join(t, NULL);
	CU(cuStreamEndCapture(own, &g));
	swapper_room(0);
	swapper_withhold(false);
	verify(&a); /* all comes in */
	take_the_gpu();
	t = start(grant_late);
	run_fill(&a, 3, NULL);
	CHECK(granted);
	pthread_join(t, NULL);
	verify(&a);
	verify(&b);
	swapper_end();
}

/* ---- calls that name memory ---- */

static struct buffer named, copied; /* away, when a call names the first */
static CUgraph graph;
static CUgraphNode node;
static CUgraphExec exec;

static CUDA_MEMCPY3D copy_to(CUdeviceptr to)
{
	return (CUDA_MEMCPY3D){ .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = copied.p,
				.dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = to,
				.WidthInBytes = 4096, .Height = 1, .Depth = 1 };
}

static CUDA_MEMSET_NODE_PARAMS set_to(CUdeviceptr to)
{
	return (CUDA_MEMSET_NODE_PARAMS){ .dst = to, .elementSize = 4, .width = 64, .height = 1 };
}

static CUresult add_copy_node(void)
{
	CUDA_MEMCPY3D p = copy_to(named.p);

	return cuGraphAddMemcpyNode(&node, graph, NULL, 0, &p, ctx);
}

static CUresult add_set_node(void)
{
	CUDA_MEMSET_NODE_PARAMS p = set_to(named.p);

	return cuGraphAddMemsetNode(&node, graph, NULL, 0, &p, ctx);
}

static CUresult add_any_node(void)
{
	CUgraphNodeParams p = { .type = CU_GRAPH_NODE_TYPE_MEMCPY };

	p.u.copy.params = copy_to(named.p);
	p.u.copy.ctx = ctx;
	return cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &p);
}

static CUresult set_node_params(void)
{
	CUDA_MEMSET_NODE_PARAMS p = set_to(named.p);

	return cuGraphMemsetNodeSetParams(node, &p);
}

static CUresult set_exec_params(void)
{
	CUDA_MEMSET_NODE_PARAMS p = set_to(named.p);

	return cuGraphExecMemsetNodeSetParams(exec, node, &p, ctx);
}

static CUresult create_texture(void)
{
	CUDA_RESOURCE_DESC r = { .resType = CU_RESOURCE_TYPE_LINEAR };
	uint32_t texture[32] = { 0 }; /* CUDA_TEXTURE_DESC */
	CUtexObject object;

	r.res.linear.devPtr = named.p;
	r.res.linear.format = CU_AD_FORMAT_FLOAT;
	r.res.linear.numChannels = 1;
	r.res.linear.sizeInBytes = 4096;
	return cuTexObjectCreate(&object, &r, texture, NULL);
}

/* The call waits until all memory is there, and needs no grant for itself. */
static void waits_for_memory(CUresult (*call)(void))
{
	pthread_t t;

	take_memory_away();
	granted = false;
	swapper_room(0);
	t = start(grant_late);
	CHECK(call() == CUDA_SUCCESS);
	CHECK(granted);
	pthread_join(t, NULL);
	verify(&named);
	take_the_gpu();
	CHECK(call() == CUDA_SUCCESS);
	CHECK(swapper_seen().holder == 0);
	swapper_withhold(false);
}

static void who_names_memory_waits_for_it(void)
{
	CUDA_MEMSET_NODE_PARAMS p;

	open_tenant();
	named = filled(1);
	copied = filled(2);
	CU(cuGraphCreate(&graph, 0));
	waits_for_memory(add_copy_node);
	waits_for_memory(add_set_node);
	waits_for_memory(add_any_node);
	waits_for_memory(create_texture);
	CU(cuGraphDestroy(graph));
	CU(cuGraphCreate(&graph, 0));
	p = set_to(copied.p);
	CU(cuGraphAddMemsetNode(&node, graph, NULL, 0, &p, ctx));
	CU(cuGraphInstantiateWithFlags(&exec, graph, 0));
	waits_for_memory(set_node_params);
	waits_for_memory(set_exec_params);
	swapper_end();
}

/* ---- what others may use without a grant stays ---- */

static void stays_once(CUresult (*bind)(const struct buffer *), struct buffer *b, uint64_t fixed)
{
	pthread_t t;

	run_fill(b, 1, NULL);
	take_away_all_but(fixed - b->bytes);
	granted = false;
	swapper_room(0);
	t = start(grant_late);
	CHECK(bind(b) == CUDA_SUCCESS);
	CHECK(granted); /* it waited until the memory was there */
	pthread_join(t, NULL);
	verify(b);
	EVENTUALLY(swapper_seen().fixed >= fixed);
	take_away_all_but(fixed);
	CHECK(swapper_seen().resident >= fixed);
	swapper_room(0);
	swapper_withhold(false);
	verify(b);
}

static CUdeviceptr handle;

static CUresult bind_handle(const struct buffer *b) { return cuLogicalEndpointBindMem(1, 0, 0, handle, 0, b->bytes, 0); }
static CUresult bind_address(const struct buffer *b)
{
	return cuLogicalEndpointBindAddr(1, 0, 0, (void *)(uintptr_t)b->p, b->bytes, 0);
}

static struct buffer mapped(uint64_t bytes)
{
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, 3 };
	struct buffer b = { .bytes = bytes };

	CU(create(&handle, bytes));
	CU(cuMemAddressReserve(&b.p, bytes, 0, 0, 0));
	CU(cuMemMap(b.p, bytes, 0, handle, 0));
	CU(cuMemSetAccess(b.p, bytes, &access, 1));
	return b;
}

static void what_an_endpoint_binds_stays(void)
{
	struct buffer b, moves;

	open_tenant();
	moves = filled(2); /* so that something leaves each time */
	b = mapped(8 * MIB);
	stays_once(bind_handle, &b, 8 * MIB);
	b = mapped(8 * MIB);
	stays_once(bind_address, &b, 16 * MIB);
	CU(cuMemAllocAsync(&b.p, b.bytes, NULL));
	stays_once(bind_address, &b, 24 * MIB);
	verify(&moves);
	swapper_end();
}

static void who_jumped_out_of_sharing_may_share_again(void)
{
	struct buffer b;
	pthread_t t;

	open_tenant();
	waiter = pthread_self();
	CHECK(signal(SIGUSR1, jump) != SIG_ERR);
	b = mapped(8 * MIB);
	run_fill(&b, 1, NULL);
	take_memory_away();
	t = start(interrupt);
	if (!sigsetjmp(back, 1)) {
		bind_handle(&b);
		CHECK(!"it waits for the memory");
	}
	pthread_join(t, NULL);
	swapper_room(0);
	swapper_withhold(false);
	CHECK(bind_handle(&b) == CUDA_SUCCESS);
	verify(&b);
	CU(cuMemUnmap(b.p, b.bytes));
	CU(cuMemRelease(handle));
	swapper_end();
}

static void stays_with(const char *path)
{
	char dir[64], whole[128], parts[128];
	struct buffer b;
	int fd;

	test_dir(dir);
	snprintf(whole, sizeof(whole), "%s%s", dir, path);
	for (char *slash = whole + strlen(dir); (slash = strchr(slash + 1, '/'));) {
		snprintf(parts, sizeof(parts), "%.*s", (int)(slash - whole), whole);
		CHECK(mkdir(parts, 0700) == 0);
	}
	open_tenant();
	b = filled(1);
	take_memory_away();
	swapper_room(0);
	swapper_withhold(false);
	verify(&b); /* it has moved */
	fd = open(whole, O_CREAT | O_RDWR, 0600);
	CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
	take_the_gpu();
	swapper_room(1);
	EVENTUALLY(swapper_seen().fixed >= LARGE); /* the scheduler knows */
	CHECK(swapper_seen().resident >= LARGE);
	swapper_room(0);
	swapper_withhold(false);
	verify(&b);
	unlink(whole);
	swapper_end();
}

static void who_else_uses_memory_keeps_it_here(void)
{
	static const char *const paths[] = { "/libnvoptix.so.1", "/libnvidia-encode.so.580.1", "/libnvcuvid.so.1",
					     "/dev/nvidia-fs3", "/dev/infiniband/uverbs0" };

	for (unsigned i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
		pid_t pid = fork();

		if (pid == 0) {
			stays_with(paths[i]);
			_exit(0);
		}
		CHECK(went_well(pid));
	}
}

/* ---- the process ends ---- */

static struct buffer late; /* away when the process ends */

static void end_with_memory_away(void (*handler)(void))
{
	CHECK(atexit(handler) == 0); /* before cuInit, so that it runs after the shim's part of exit() */
	open_tenant();
	late = filled(1);
	take_memory_away();
}

static void use_late_memory(void)
{
	verify(&late);
	for (unsigned i = 0; i < 3; i++) {
		run_fill(&late, i, NULL);
		work(50);
		verify(&late);
	}
}

static void use_it_when_it_comes(void)
{
	swapper_room(0);
	swapper_withhold(false);
	use_late_memory();
}

static void a_late_handler_gets_its_memory(void) { end_with_memory_away(use_it_when_it_comes); }

/* The first grant is revoked when a part of the memory is there. */
static void revoke_in_the_middle(void)
{
	EVENTUALLY(swapper_seen().filling && swapper_seen().resident >= LARGE / 4);
	take_the_gpu();
	swapper_room(0);
	swapper_withhold(false);
}

static void use_it_after_a_revoke(void)
{
	pthread_t t = start(revoke_in_the_middle);

	swapper_room(LARGE - 2 * MIB);
	swapper_withhold(false);
	use_late_memory();
	pthread_join(t, NULL);
}

static void a_late_handler_waits_for_all_its_memory(void) { end_with_memory_away(use_it_after_a_revoke); }

/* ---- the application takes descriptors, as after closefrom(3) ---- */

static int mine = -1;          /* takes the number of a descriptor of the shim */
static atomic_int taken = -1;  /* that number */
static atomic_bool is_taken;

/* The shim's too: it duplicates what came from the scheduler, for a thread that maps it. */
int fcntl(int fd, int cmd, ...)
{
	int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl");
	va_list args;
	long arg;
	int result;

	va_start(args, cmd);
	arg = va_arg(args, long);
	va_end(args);
	result = real(fd, cmd, arg);
	if (cmd == F_DUPFD_CLOEXEC && taken < 0)
		taken = result;
	return result;
}

/* That thread names itself before it maps anything. */
int prctl(int option, ...)
{
	int (*real)(int, ...) = (int (*)(int, ...))dlsym(RTLD_NEXT, "prctl");
	va_list args;
	unsigned long arg;

	va_start(args, option);
	arg = va_arg(args, unsigned long);
	va_end(args);
	if (option == PR_SET_NAME && mine >= 0 && strcmp((const char *)arg, "nvshare-arena") == 0)
		is_taken = dup2(mine, taken) == taken;
	return real(option, arg, 0, 0, 0);
}

static void an_application_takes_an_arena_segment(void)
{
	struct buffer b;
	struct stat a, now;

	mine = memfd_create("mine", 0);
	CHECK(mine >= 0 && ftruncate(mine, 16 * MIB) == 0 && fstat(mine, &a) == 0);
	open_tenant();
	b = filled(1);
	EVENTUALLY(is_taken);
	take_memory_away(); /* into the other segments */
	CHECK(fstat(taken, &now) == 0 && now.st_ino == a.st_ino);
	CHECK(a.st_blocks == 0 && now.st_blocks == 0);
	swapper_room(0);
	swapper_withhold(false);
	verify(&b);
	swapper_end();
}

/* The revoke comes while a kernel runs, for longer than the shim once waited at the end. */
static void use_the_gpu_when_it_is_given_again(void)
{
	uint64_t ns = 1500000000, zero = 0;
	void *params[] = { &ns, &zero };
	pthread_t t;

	CU(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	swapper_withhold(true);
	EVENTUALLY(swapper_seen().revoked);
	t = start(grant_late);
	run_fill(&late, 2, NULL);
	CHECK(granted);
	pthread_join(t, NULL);
	verify(&late);
}

static void a_late_handler_obeys_a_revoke(void)
{
	grace_ms = 3600000;
	CHECK(atexit(use_the_gpu_when_it_is_given_again) == 0);
	open_tenant();
	late = filled(1);
}

static atomic_bool hold_threads; /* those that are made begin later */
static atomic_bool let_them_go, late_ended;

struct entry {
	void *(*run)(void *);
	void *arg;
};

static void *run_late(void *arg)
{
	struct entry e = *(struct entry *)arg;

	free(arg);
	EVENTUALLY(let_them_go);
	e.run(e.arg);
	late_ended = true;
	return NULL;
}

/* The shim's too. */
int pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
	int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
		(int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
	struct entry *e;

	if (!hold_threads)
		return real(t, attr, run, arg);
	e = malloc(sizeof(*e));
	CHECK(e);
	*e = (struct entry){ run, arg };
	return real(t, attr, run_late, e);
}

/* The driver may be taken down by now: the shim calls it no more, and the grant ends with the process. */
static void run_the_late_thread(void)
{
	struct timespec heard = { 0, 100000000 };

	let_them_go = true;
	EVENTUALLY(late_ended);
	nanosleep(&heard, NULL);
	CHECK(swapper_seen().holder == getpid());
}

static void a_late_thread_leaves_the_driver_alone(void)
{
	CHECK(atexit(run_the_late_thread) == 0); /* before cuInit, see end_with_memory_away */
	open_tenant();
	late = filled(1);
	CHECK(swapper_seen().holder == getpid());
	hold_threads = true; /* that of the shim which gives the grant back */
}

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(an_allocation_outlives_the_scheduler),
	CASE(a_handle_outlives_the_scheduler),
	CASE(a_free_waits_for_work_that_went_ahead),
	CASE(who_jumped_out_waits_for_a_grant),
	CASE(who_names_memory_waits_for_it),
	CASE(what_an_endpoint_binds_stays),
	CASE(who_jumped_out_of_sharing_may_share_again),
	CASE(who_else_uses_memory_keeps_it_here),
	CASE(an_application_takes_an_arena_segment),
	CASE(an_arena_is_mapped_later),
	CASE(a_late_handler_obeys_a_revoke),
	CASE(a_late_thread_leaves_the_driver_alone),
	CASE(a_late_handler_gets_its_memory),
	CASE(a_late_handler_waits_for_all_its_memory),
};

int main(int argc, char **argv)
{
	alarm(600);
	return run_case(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
