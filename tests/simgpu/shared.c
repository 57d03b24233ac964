// SPDX-License-Identifier: Apache-2.0
/* shared.c: see shared.h. Only flock, record locks and plain stores. */
#include "shared_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MERGE_SPAN_NS 10000000ull  /* longest merged record */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* flock is per descriptor */
static int fd = -1; /* never closed: a close would drop the slot's record lock */
struct sim_state *sim_st;
struct sim_log *sim_lg;
int sim_self = -1;

uint64_t sim_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

void sim_lock(void)
{
	pthread_mutex_lock(&mu);
	while (flock(fd, LOCK_EX) && errno == EINTR)
		;
}

void sim_unlock(void)
{
	flock(fd, LOCK_UN);
	pthread_mutex_unlock(&mu);
}

#define RUNNING_LOOK_NS 50000000 /* a wake may be lost with the process that owes it */

static uint32_t *process_word(void)
{
	return &sim_st->slot[sim_self].process;
}

/* Who has failed for good waits for nothing. */
static int waits(uint32_t state)
{
	return state && state != SIM_PROCESS_FAILED;
}

int sim_process_failed(void)
{
	return sim_self >= 0 && __atomic_load_n(process_word(), __ATOMIC_ACQUIRE) == SIM_PROCESS_FAILED;
}

void sim_await_running(void)
{
	static const struct timespec look = { 0, RUNNING_LOOK_NS };
	uint32_t state;

	while (sim_self >= 0 && waits(state = __atomic_load_n(process_word(), __ATOMIC_ACQUIRE)))
		syscall(SYS_futex, process_word(), FUTEX_WAIT, state, &look, NULL, 0);
}

void sim_lock_running(void)
{
	sim_lock();
	while (sim_self >= 0 && waits(*process_word())) {
		sim_unlock();
		sim_await_running();
		sim_lock();
	}
}

int sim_at(int gpu)
{
	return sim_self < 0 ? gpu : (int)__atomic_load_n(&sim_st->slot[sim_self].at[gpu], __ATOMIC_ACQUIRE);
}

void sim_count_managed(int delta)
{
	sim_lock();
	if (sim_self >= 0)
		sim_st->slot[sim_self].managed += (uint32_t)delta;
	sim_unlock();
}

void sim_count_exchanged(int delta)
{
	sim_lock();
	if (sim_self >= 0)
		sim_st->slot[sim_self].exchanged += (uint32_t)delta;
	sim_unlock();
}

const char *sim_state_dir(void)
{
	const char *d = getenv(SIM_DIR_ENV);

	return d && *d ? d : SIM_DIR_DEFAULT;
}

static int complain(const char *what, const char *name)
{
	fprintf(stderr, "simgpu: %s %s/%s: %s (is " SIM_DIR_ENV " right?)\n", what, sim_state_dir(), name, strerror(errno));
	return -1;
}

/* As sim_open_file(), for the directory. */
static void make_dir(void)
{
	char fresh[4200];
	struct stat sb;

	if (!stat(sim_state_dir(), &sb))
		return;
	snprintf(fresh, sizeof fresh, "%s.%d.%lx", sim_state_dir(), (int)getpid(), (unsigned long)pthread_self());
	if (mkdir(fresh, 0700))
		return;
	(void)!chmod(fresh, 01777);
	if (!syscall(SYS_renameat2, AT_FDCWD, fresh, AT_FDCWD, sim_state_dir(), 1 /* not over another */))
		return;
	if (errno != EEXIST && !rename(fresh, sim_state_dir())) /* a file system that cannot tell */
		return;
	rmdir(fresh);
}

int sim_open_file(const char *name, int flags)
{
	char path[4096], fresh[4200];
	int f;

	snprintf(path, sizeof path, "%s/%s", sim_state_dir(), name);
	f = open(path, (flags & ~O_CREAT) | O_CLOEXEC);
	if (f >= 0 || errno != ENOENT || !(flags & O_CREAT))
		return f;
	/* Other containers run as other users: nobody sees the file before all may open it. */
	snprintf(fresh, sizeof fresh, "%s.%d.%lx", path, (int)getpid(), (unsigned long)pthread_self());
	f = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (f < 0)
		return f;
	(void)!fchmod(f, 0666);
	close(f);
	(void)!link(fresh, path); /* else another process was first */
	unlink(fresh);
	return open(path, (flags & ~(O_CREAT | O_EXCL)) | O_CLOEXEC);
}

/* Reads config, writing the defaults first if there is none. */
static void read_config(struct sim_state *to)
{
	char text[512], *line, *save = NULL;
	unsigned long long v;
	ssize_t n = 0;
	int f;

	to->gpus = 1;
	to->memory = 16384ull << 20;
	to->log_records = 1u << 18;
	f = sim_open_file("config", O_RDONLY);
	if (f < 0) {
		f = sim_open_file("config", O_WRONLY | O_CREAT); /* the state's lock is held */
		if (f >= 0) {
			dprintf(f, "gpus=%u\nmemory_mib=%llu\nlog_records=%u\n", to->gpus,
				(unsigned long long)to->memory >> 20, to->log_records);
			close(f);
		}
		return;
	}
	n = read(f, text, sizeof text - 1);
	close(f);
	text[n > 0 ? n : 0] = 0;
	for (line = strtok_r(text, " \t\r\n", &save); line; line = strtok_r(NULL, " \t\r\n", &save)) {
		if (sscanf(line, "gpus=%llu", &v) == 1 && v >= 1 && v <= SIM_MAX_GPUS)
			to->gpus = (uint32_t)v;
		else if (sscanf(line, "memory_mib=%llu", &v) == 1 && v >= 1 && v < 1ull << 30)
			to->memory = v << 20;
		else if (sscanf(line, "log_records=%llu", &v) == 1 && v >= 16 && v <= 1ull << 26)
			to->log_records = (uint32_t)v;
		else if (*line != '#')
			fprintf(stderr, "simgpu: %s/config: ignored '%s' (known: gpus=1..%d, memory_mib, log_records)\n",
				sim_state_dir(), line, SIM_MAX_GPUS);
	}
}

static int map_log(uint32_t records)
{
	size_t size = sizeof(struct sim_log) + (size_t)records * sizeof(struct sim_record);
	struct sim_log *m;
	struct stat sb;
	int f = sim_open_file("log", O_RDWR | O_CREAT);

	if (f < 0)
		return complain("open", "log");
	if (fstat(f, &sb) || ((size_t)sb.st_size != size && (ftruncate(f, 0) || ftruncate(f, (off_t)size)))) {
		complain("size", "log");
		close(f);
		return -1;
	}
	m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
	close(f);
	if (m == MAP_FAILED)
		return complain("map", "log");
	if (m->magic != SIM_LOG_MAGIC) {
		m->capacity = records;
		m->next = 0;
		__atomic_store_n(&m->magic, SIM_LOG_MAGIC, __ATOMIC_RELEASE);
	}
	sim_lg = m;
	return 0;
}

int sim_open(void)
{
	struct sim_state *m = MAP_FAILED;
	struct stat sb;
	int f, rc = -1;

	if (sim_st)
		return 0;
	make_dir();
	f = sim_open_file("state", O_RDWR | O_CREAT);
	if (f < 0)
		return complain("open", "state");
	while (flock(f, LOCK_EX) && errno == EINTR)
		;
	if (fstat(f, &sb) || (sb.st_size == 0 && ftruncate(f, sizeof *sim_st))) {
		complain("size", "state");
		goto out;
	}
	if (sb.st_size != 0 && sb.st_size != sizeof *sim_st) {
		fprintf(stderr, "simgpu: %s/state is of another version: remove the directory\n", sim_state_dir());
		goto out;
	}
	m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
	if (m == MAP_FAILED) {
		complain("map", "state");
		goto out;
	}
	if (m->magic != SIM_STATE_MAGIC) {
		read_config(m);
		for (int i = 0; i < SIM_MAX_GPUS; i++)
			m->gpu[i].serves = -1;
		__atomic_store_n(&m->magic, SIM_STATE_MAGIC, __ATOMIC_RELEASE);
	}
	rc = map_log(m->log_records);
out:
	flock(f, LOCK_UN);
	if (rc) {
		if (m != MAP_FAILED)
			munmap(m, sizeof *m);
		close(f);
		return -1;
	}
	fd = f;
	sim_st = m;
	return 0;
}

void sim_close(void)
{
	if (!sim_st)
		return;
	munmap(sim_lg, sizeof *sim_lg + (size_t)sim_lg->capacity * sizeof(struct sim_record));
	munmap(sim_st, sizeof *sim_st);
	close(fd);
	sim_lg = NULL;
	sim_st = NULL;
	fd = -1;
}

/* When this process started, in clock ticks since boot; 0 unknown. */
static uint64_t start_ticks(void)
{
	unsigned long long ticks = 0;
	char text[1024];
	ssize_t n;
	char *p;
	int f = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);

	if (f < 0)
		return 0;
	n = read(f, text, sizeof text - 1);
	close(f);
	text[n > 0 ? n : 0] = 0;
	p = strrchr(text, ')'); /* the name before it may hold anything */
	if (!p || sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) != 1)
		return 0;
	return ticks;
}

/* Whether a process holds slot i; stores its pid as seen from here, or 0. */
static int held(int i, uint32_t *pid)
{
	struct flock fl = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1 };
	static uint64_t my_ns, my_start;
	struct stat sb;

	*pid = 0;
	if (i == sim_self) {
		*pid = (uint32_t)getpid();
		return 1;
	}
	if (fcntl(fd, F_GETLK, &fl) || fl.l_type != F_UNLCK) {
		*pid = fl.l_pid > 0 ? (uint32_t)fl.l_pid : 0;
		return 1;
	}
	/* F_GETLK is silent about this process's own locks: NVML beside CUDA. */
	if (!my_ns) {
		my_ns = stat("/proc/self/ns/pid", &sb) ? 1 : sb.st_ino;
		my_start = start_ticks();
	}
	*pid = (uint32_t)getpid();
	return sim_st->slot[i].pid == *pid && sim_st->slot[i].pid_ns == my_ns && sim_st->slot[i].started == my_start;
}

static struct sim_record *record_add(int i, int gpu, int kind, uint64_t submit)
{
	struct sim_slot *s = &sim_st->slot[i];
	struct sim_record *r = &sim_lg->record[sim_lg->next % sim_lg->capacity];

	memset(r, 0, sizeof *r);
	r->submit_ns = r->start_ns = r->end_ns = submit;
	r->pid = s->pid;
	r->generation = s->generation;
	r->slot = (uint16_t)i;
	r->gpu = (uint8_t)gpu;
	r->kind = (uint8_t)kind;
	memcpy(r->tenant, s->tenant, sizeof r->tenant);
	return r;
}

static void record_publish(void)
{
	__atomic_store_n(&sim_lg->next, sim_lg->next + 1, __ATOMIC_RELEASE);
}

#define OFF_SCAN 4096 /* records, of all processes, among which those of work in flight are */

void sim_record_off(int gpu, uint64_t now)
{
	struct sim_slot *s = &sim_st->slot[sim_self];

	for (uint64_t i = 1; i <= OFF_SCAN && i <= sim_lg->next && i < sim_lg->capacity; i++) {
		struct sim_record *r = &sim_lg->record[(sim_lg->next - i) % sim_lg->capacity];
		/* A copy that has begun goes on; another one waits for compute work, or is taken to. */
		int copy = r->kind == SIM_HTOD || r->kind == SIM_DTOH;

		if (r->slot != sim_self || r->generation != s->generation || r->gpu != gpu || r->kind >= SIM_KINDS ||
		    r->end_ns <= now || (copy && r->start_ns < now))
			continue;
		if (r->busy_ns)
			r->busy_ns = r->busy_ns > r->end_ns - now ? r->busy_ns - (uint32_t)(r->end_ns - now) : 1;
		if (r->start_ns > now)
			r->start_ns = now;
		__atomic_store_n(&r->end_ns, now, __ATOMIC_RELEASE);
	}
	memset(s->gpu[gpu].last_log, 0, sizeof s->gpu[gpu].last_log); /* nothing is added to these */
}

void sim_record_on(int gpu, uint64_t now, uint64_t left)
{
	struct sim_slot_gpu *s = &sim_st->slot[sim_self].gpu[gpu];
	uint32_t count = s->held_back;
	struct sim_record *r;

	left -= left < s->held_marks ? left : s->held_marks;
	s->held_back = s->held_marks = 0;
	if (!left)
		return;
	r = record_add(sim_self, gpu, SIM_KERNEL, now);
	r->start_ns = now;
	r->end_ns = now + left;
	r->count = count;
	s->last_log[SIM_KERNEL] = sim_lg->next + 1;
	record_publish();
}

void sim_record_work(int gpu, int kind, uint64_t submit, uint64_t start, uint64_t end)
{
	uint64_t *last;
	struct sim_record *r;

	if (kind == SIM_MARK) {
		if (sim_st->slot[sim_self].gpu[gpu].off)
			sim_st->slot[sim_self].gpu[gpu].held_marks += (uint32_t)(end - start);
		return;
	}
	last = &sim_st->slot[sim_self].gpu[gpu].last_log[kind];
	if ((kind == SIM_KERNEL || kind == SIM_DTOD) && sim_st->slot[sim_self].gpu[gpu].off) {
		sim_st->slot[sim_self].gpu[gpu].held_back++;
		return;
	}
	if (*last && sim_lg->next - (*last - 1) < sim_lg->capacity) {
		r = &sim_lg->record[(*last - 1) % sim_lg->capacity];
		if (r->slot == sim_self && r->generation == sim_st->slot[sim_self].generation && r->gpu == gpu && r->kind == kind &&
		    submit <= r->end_ns && end - r->submit_ns <= MERGE_SPAN_NS) {
			if (!r->busy_ns)
				r->busy_ns = (uint32_t)(r->end_ns - r->start_ns);
			r->busy_ns += (uint32_t)(end - start);
			r->count++;
			__atomic_store_n(&r->end_ns, end, __ATOMIC_RELEASE);
			return;
		}
	}
	r = record_add(sim_self, gpu, kind, submit);
	r->start_ns = start;
	r->end_ns = end;
	r->count = 1;
	*last = sim_lg->next + 1;
	record_publish();
}

static void bury(int i)
{
	struct sim_slot *s = &sim_st->slot[i];

	record_add(i, 0, SIM_EXIT, sim_now());
	record_publish();
	__atomic_store_n(&s->used, 0, __ATOMIC_RELEASE);
	while (sim_st->high > 0 && !sim_st->slot[sim_st->high - 1].used)
		sim_st->high--;
}

int sim_slot_of(uint32_t pid)
{
	uint32_t theirs;

	for (int i = 0; i < (int)sim_st->high; i++)
		if (sim_st->slot[i].used && held(i, &theirs) && theirs == pid)
			return i;
	return -1;
}

void sim_bury_dead(void)
{
	uint32_t pid;

	for (int i = (int)sim_st->high - 1; i >= 0; i--)
		if (sim_st->slot[i].used && !held(i, &pid))
			bury(i);
}

/* A free slot whose record lock is ours now, or -1. */
static int take_slot(void)
{
	for (int i = 0; i < SIM_MAX_SLOTS; i++) {
		struct flock fl = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1 };

		if (!sim_st->slot[i].used && fcntl(fd, F_SETLK, &fl) == 0)
			return i;
	}
	return -1;
}

/* Cuts what does not fit; out was zeroed. */
static void copy_name(char *out, size_t n, const char *name)
{
	memcpy(out, name, strnlen(name, n - 1));
}

static void tenant_name(char *out, size_t n)
{
	const char *e = getenv(SIM_TENANT_ENV);
	char host[256] = "";

	if (!e || !*e) {
		gethostname(host, sizeof host - 1);
		e = host[0] && strcmp(host, "localhost") && strcmp(host, "(none)") ? host : program_invocation_short_name;
	}
	copy_name(out, n, e);
}

int sim_join(uint32_t group)
{
	struct sim_slot *s;
	uint32_t generation;
	struct stat sb;
	int i;

	sim_lock();
	sim_bury_dead();
	i = take_slot();
	if (i < 0) {
		sim_unlock();
		fprintf(stderr, "simgpu: all %d process slots of %s are taken\n", SIM_MAX_SLOTS, sim_state_dir());
		return -1;
	}
	s = &sim_st->slot[i];
	generation = s->generation + 1;
	memset(s, 0, sizeof *s);
	s->generation = generation;
	s->pid = (uint32_t)getpid();
	s->group = group;
	s->pid_ns = stat("/proc/self/ns/pid", &sb) ? 1 : sb.st_ino;
	s->started = start_ticks();
	s->uid = (uint32_t)geteuid();
	for (uint32_t g = 0; g < SIM_MAX_GPUS; g++)
		s->at[g] = g;
	tenant_name(s->tenant, sizeof s->tenant);
	copy_name(s->comm, sizeof s->comm, program_invocation_short_name);
	if (sim_st->high < (uint32_t)i + 1)
		sim_st->high = (uint32_t)i + 1;
	__atomic_store_n(&s->used, 1, __ATOMIC_RELEASE);
	sim_self = i;
	record_add(i, 0, SIM_START, sim_now());
	record_publish();
	sim_unlock();
	return 0;
}

void sim_leave(void)
{
	if (sim_self < 0)
		return;
	sim_lock();
	bury(sim_self);
	sim_self = -1;
	sim_unlock();
}

void sim_fork_prepare(void)
{
	pthread_mutex_lock(&mu);
}

void sim_fork_parent(void)
{
	pthread_mutex_unlock(&mu);
}

void sim_fork_child(void)
{
	pthread_mutex_init(&mu, NULL);
	/* flock follows the descriptor, which the child now shares: drop ours. */
	if (fd >= 0)
		close(fd);
	fd = -1;
	sim_self = -1;
	sim_st = NULL;
	sim_lg = NULL;
}

int sim_gpus(void)
{
	return (int)sim_st->gpus;
}

uint64_t sim_memory(void)
{
	return sim_st->memory;
}

int sim_bury_pending(int gpu, uint64_t now)
{
	int n = 0;

	for (int i = (int)sim_st->high - 1; i >= 0; i--) {
		const struct sim_slot *s = &sim_st->slot[i];
		uint32_t pid;
		int pending = 0;

		if (!s->used || i == sim_self)
			continue;
		for (int e = SIM_COMPUTE + 1; e < SIM_ENGINES; e++)
			pending |= s->gpu[gpu].tail[e] > now;
		pending |= sim_has_work(&s->gpu[gpu]);
		if (pending && !held(i, &pid)) {
			bury(i);
			n++;
		}
	}
	return n;
}

uint64_t sim_used_locked(int gpu)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < sim_st->high; i++)
		if (sim_st->slot[i].used)
			sum += sim_st->slot[i].gpu[gpu].memory;
	return sum;
}

int sim_charge(int gpu, uint64_t bytes)
{
	int rc = -1;

	sim_lock_running();
	gpu = sim_at(gpu);
	if (sim_self >= 0 && bytes <= sim_st->memory) {
		if (sim_used_locked(gpu) > sim_st->memory - bytes)
			sim_bury_dead();
		if (sim_used_locked(gpu) <= sim_st->memory - bytes) {
			sim_st->slot[sim_self].gpu[gpu].memory += bytes;
			rc = 0;
		}
	}
	sim_unlock();
	return rc;
}

void sim_uncharge(int gpu, uint64_t bytes)
{
	sim_lock_running();
	if (sim_self >= 0)
		sim_st->slot[sim_self].gpu[sim_at(gpu)].memory -= bytes;
	sim_unlock();
}

uint64_t sim_used(int gpu)
{
	uint64_t sum;

	sim_lock();
	sim_bury_dead();
	sum = sim_used_locked(sim_at(gpu));
	sim_unlock();
	return sum;
}

void sim_count_context(int gpu, int delta)
{
	sim_lock_running();
	if (sim_self >= 0)
		sim_st->slot[sim_self].gpu[sim_at(gpu)].contexts += (uint32_t)delta;
	sim_unlock();
}

int sim_users(int gpu, struct sim_user *out, int n)
{
	int found = 0;
	uint32_t pid;

	sim_lock();
	sim_advance(gpu, sim_now());
	for (uint32_t i = 0; i < sim_st->high; i++) {
		const struct sim_slot_gpu *g = &sim_st->slot[i].gpu[gpu];

		if (!sim_st->slot[i].used || !(g->contexts || g->memory))
			continue;
		if (!held((int)i, &pid) || !pid) /* dead, or of a pid namespace not below ours */
			continue;
		if (found < n)
			out[found] = (struct sim_user){ pid, g->memory, (uint64_t)i << 32 | sim_st->slot[i].generation, g->ran };
		found++;
	}
	sim_unlock();
	return found;
}

int sim_busy(int gpu)
{
	uint64_t now = sim_now();
	int busy = 0;

	sim_lock();
	sim_bury_pending(gpu, now);
	sim_advance(gpu, now);
	for (uint32_t i = 0; i < sim_st->high; i++)
		busy |= sim_st->slot[i].used && sim_has_work(&sim_st->slot[i].gpu[gpu]);
	sim_unlock();
	return busy;
}

void sim_uuid_text(int gpu, char out[41])
{
	snprintf(out, 41, "GPU-51600000-0000-4000-8000-%012x", (unsigned)gpu);
}

void sim_uuid_raw(int gpu, unsigned char out[16])
{
	static const unsigned char base[16] = { 0x51, 0x60, 0, 0, 0, 0, 0x40, 0, 0x80 };

	memcpy(out, base, 16);
	out[15] = (unsigned char)gpu;
}

int sim_nodes(int index[SIM_MAX_GPUS])
{
	int total = sim_gpus(), n = 0;

	for (int i = 0; i < total; i++) {
		char name[64];

		snprintf(name, sizeof name, SIM_NODE_ENV "%d", i);
		if (getenv(name))
			index[n++] = i;
	}
	if (n == 0)
		for (; n < total; n++)
			index[n] = n;
	return n;
}

int sim_visible(const char *list, const int *from, int nfrom, int index[SIM_MAX_GPUS])
{
	char text[1024], *word, *save = NULL;
	int n = 0;

	if (!list) {
		memcpy(index, from, sizeof *from * (size_t)nfrom);
		return nfrom;
	}
	snprintf(text, sizeof text, "%s", list);
	for (word = strtok_r(text, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
		int hit = -1;
		char *end;
		long v = strtol(word, &end, 10);

		if (!strcmp(word, "all")) {
			memcpy(index, from, sizeof *from * (size_t)nfrom);
			return nfrom;
		}
		if (*end == 0) {
			hit = v >= 0 && v < nfrom ? from[v] : -1;
		} else {
			for (int i = 0; i < nfrom; i++) {
				char uuid[41];

				sim_uuid_text(from[i], uuid);
				if (!strcasecmp(uuid, word))
					hit = from[i];
			}
		}
		for (int i = 0; i < n; i++)
			if (index[i] == hit)
				hit = -1;
		if (hit < 0 || n == SIM_MAX_GPUS)
			break; /* as the driver does: the list ends at the first bad entry */
		index[n++] = hit;
	}
	return n;
}
