// SPDX-License-Identifier: Apache-2.0
/* shared.c: see shared.h. Only flock, record locks and plain stores. */
#include "shared.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MERGE_SPAN_NS 10000000ull  /* longest merged record */
#define SWEEP_NS      100000000ull /* between two looks for dead processes */
#define LOOK_NS       500000ull    /* between two looks at a clock that stands still */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* flock is per descriptor */
static int fd = -1; /* never closed: a close would drop the slot's record lock */
static struct sim_state *st;
static struct sim_log *lg;
static int self = -1;

uint64_t sim_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

static void lock(void)
{
	pthread_mutex_lock(&mu);
	while (flock(fd, LOCK_EX) && errno == EINTR)
		;
}

static void unlock(void)
{
	flock(fd, LOCK_UN);
	pthread_mutex_unlock(&mu);
}

static const char *state_dir(void)
{
	const char *d = getenv(SIM_DIR_ENV);

	return d && *d ? d : SIM_DIR_DEFAULT;
}

static int complain(const char *what, const char *name)
{
	fprintf(stderr, "simgpu: %s %s/%s: %s (is " SIM_DIR_ENV " right?)\n", what, state_dir(), name, strerror(errno));
	return -1;
}

static int open_file(const char *name, int flags)
{
	char path[4096];
	int f;

	snprintf(path, sizeof path, "%s/%s", state_dir(), name);
	f = open(path, flags | O_CLOEXEC, 0666);
	if (f >= 0 && (flags & O_CREAT))
		(void)!fchmod(f, 0666); /* other containers run as other users */
	return f;
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
	f = open_file("config", O_RDONLY);
	if (f < 0) {
		f = open_file("config", O_WRONLY | O_CREAT | O_EXCL);
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
				state_dir(), line, SIM_MAX_GPUS);
	}
}

static int map_log(uint32_t records)
{
	size_t size = sizeof(struct sim_log) + (size_t)records * sizeof(struct sim_record);
	struct sim_log *m;
	struct stat sb;
	int f = open_file("log", O_RDWR | O_CREAT);

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
	lg = m;
	return 0;
}

int sim_open(void)
{
	struct sim_state *m = MAP_FAILED;
	struct stat sb;
	int f, rc = -1;

	if (st)
		return 0;
	if (mkdir(state_dir(), 01777) == 0)
		(void)!chmod(state_dir(), 01777);
	f = open_file("state", O_RDWR | O_CREAT);
	if (f < 0)
		return complain("open", "state");
	while (flock(f, LOCK_EX) && errno == EINTR)
		;
	if (fstat(f, &sb) || (sb.st_size == 0 && ftruncate(f, sizeof *st))) {
		complain("size", "state");
		goto out;
	}
	if (sb.st_size != 0 && sb.st_size != sizeof *st) {
		fprintf(stderr, "simgpu: %s/state is of another version: remove the directory\n", state_dir());
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
	st = m;
	return 0;
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
	if (i == self) {
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
	return st->slot[i].pid == *pid && st->slot[i].pid_ns == my_ns && st->slot[i].started == my_start;
}

static int has_work(const struct sim_slot_gpu *s)
{
	return s->v < s->tail[SIM_COMPUTE];
}

static struct sim_record *record_add(int i, int gpu, int kind, uint64_t submit)
{
	struct sim_slot *s = &st->slot[i];
	struct sim_record *r = &lg->record[lg->next % lg->capacity];

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
	__atomic_store_n(&lg->next, lg->next + 1, __ATOMIC_RELEASE);
}

static void record_work(int gpu, int kind, uint64_t submit, uint64_t start, uint64_t end)
{
	uint64_t *last = &st->slot[self].gpu[gpu].last_log[kind];
	struct sim_record *r;

	if (*last && lg->next - (*last - 1) < lg->capacity) {
		r = &lg->record[(*last - 1) % lg->capacity];
		if (r->slot == self && r->generation == st->slot[self].generation && r->gpu == gpu && r->kind == kind &&
		    submit <= r->end_ns && end - r->submit_ns <= MERGE_SPAN_NS) {
			if (!r->busy_ns)
				r->busy_ns = (uint32_t)(r->end_ns - r->start_ns);
			r->busy_ns += (uint32_t)(end - start);
			r->count++;
			__atomic_store_n(&r->end_ns, end, __ATOMIC_RELEASE);
			return;
		}
	}
	r = record_add(self, gpu, kind, submit);
	r->start_ns = start;
	r->end_ns = end;
	r->count = 1;
	*last = lg->next + 1;
	record_publish();
}

static void bury(int i)
{
	struct sim_slot *s = &st->slot[i];

	record_add(i, 0, SIM_EXIT, sim_now());
	record_publish();
	__atomic_store_n(&s->used, 0, __ATOMIC_RELEASE);
	while (st->high > 0 && !st->slot[st->high - 1].used)
		st->high--;
}

static void bury_dead(void)
{
	uint32_t pid;

	for (int i = (int)st->high - 1; i >= 0; i--)
		if (st->slot[i].used && !held(i, &pid))
			bury(i);
}

/* A free slot whose record lock is ours now, or -1. */
static int take_slot(void)
{
	for (int i = 0; i < SIM_MAX_SLOTS; i++) {
		struct flock fl = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1 };

		if (!st->slot[i].used && fcntl(fd, F_SETLK, &fl) == 0)
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

int sim_join(void)
{
	struct sim_slot *s;
	uint32_t generation;
	struct stat sb;
	int i;

	lock();
	bury_dead();
	i = take_slot();
	if (i < 0) {
		unlock();
		fprintf(stderr, "simgpu: all %d process slots of %s are taken\n", SIM_MAX_SLOTS, state_dir());
		return -1;
	}
	s = &st->slot[i];
	generation = s->generation + 1;
	memset(s, 0, sizeof *s);
	s->generation = generation;
	s->pid = (uint32_t)getpid();
	s->pid_ns = stat("/proc/self/ns/pid", &sb) ? 1 : sb.st_ino;
	s->started = start_ticks();
	tenant_name(s->tenant, sizeof s->tenant);
	copy_name(s->comm, sizeof s->comm, program_invocation_short_name);
	if (st->high < (uint32_t)i + 1)
		st->high = (uint32_t)i + 1;
	__atomic_store_n(&s->used, 1, __ATOMIC_RELEASE);
	self = i;
	record_add(i, 0, SIM_START, sim_now());
	record_publish();
	unlock();
	return 0;
}

void sim_leave(void)
{
	if (self < 0)
		return;
	lock();
	bury(self);
	self = -1;
	unlock();
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
	self = -1;
	st = NULL;
	lg = NULL;
}

int sim_gpus(void)
{
	return (int)st->gpus;
}

uint64_t sim_memory(void)
{
	return st->memory;
}

/* Drops dead processes that have work pending on a GPU. Returns how many. */
static int bury_pending(int gpu, uint64_t now)
{
	int n = 0;

	for (int i = (int)st->high - 1; i >= 0; i--) {
		const struct sim_slot *s = &st->slot[i];
		uint32_t pid;
		int pending = 0;

		if (!s->used || i == self)
			continue;
		for (int e = SIM_COMPUTE + 1; e < SIM_ENGINES; e++)
			pending |= s->gpu[gpu].tail[e] > now;
		pending |= has_work(&s->gpu[gpu]);
		if (pending && !held(i, &pid)) {
			bury(i);
			n++;
		}
	}
	return n;
}

/* ---- the compute engine ---- */

static int in_gap(const struct sim_slot_gpu *s)
{
	return s->v >= s->gap_from && s->v < s->gap_to;
}

/* Whether a process wants the engine now. */
static int wants(const struct sim_slot *s, int gpu)
{
	return s->used && has_work(&s->gpu[gpu]) && !s->gpu[gpu].off && !in_gap(&s->gpu[gpu]);
}

/* From here on its clock goes with the day's: a new segment if it stood still before. */
static void goes(struct sim_slot_gpu *s, uint64_t at)
{
	const struct sim_segment *last = &s->segment[(s->segments - 1) % SIM_SEGMENTS];

	if (!s->segments || at - s->v != last->t - last->v)
		s->segment[s->segments++ % SIM_SEGMENTS] = (struct sim_segment){ s->v, at };
}

/* A process that has work stood still: what is in the log of it ends later. */
static void stood_still(const struct sim_slot *s, int gpu, uint64_t at, uint64_t ns)
{
	static const int kinds[] = { SIM_KERNEL, SIM_DTOD };

	for (int k = 0; k < 2; k++) {
		uint64_t last = s->gpu[gpu].last_log[kinds[k]];
		struct sim_record *r = &lg->record[(last - 1) % lg->capacity];

		if (!last || lg->next - (last - 1) >= lg->capacity || r->slot != s - st->slot ||
		    r->generation != s->generation || r->gpu != gpu || r->end_ns < at)
			continue;
		if (!r->busy_ns)
			r->busy_ns = (uint32_t)(r->end_ns - r->start_ns);
		if (r->start_ns >= at)
			r->start_ns += ns;
		__atomic_store_n(&r->end_ns, r->end_ns + ns, __ATOMIC_RELEASE);
	}
}

static uint64_t slice_of(int slot, int gpu)
{
	uint64_t ns = st->slot[slot].gpu[gpu].slice;

	return ns ? ns : SIM_SLICE_NS;
}

/* Who is served: who was, while it wants and its slice lasts, else the next in the round; -1 nobody. */
static int serve(struct sim_gpu *g, int gpu, int *others)
{
	int n = (int)st->high, next = -1, last = g->serves;

	*others = 0;
	if (last >= n || (last >= 0 && st->slot[last].generation != g->generation))
		last = g->serves = -1;
	for (int k = 1; k <= n; k++) {
		int i = (last + k) % n;

		if (!wants(&st->slot[i], gpu) || i == last)
			continue;
		if (next < 0)
			next = i;
		++*others;
	}
	if (last >= 0 && wants(&st->slot[last], gpu) && (g->slice_left || next < 0)) {
		if (!g->slice_left)
			g->slice_left = slice_of(last, gpu);
		return last;
	}
	if (next < 0)
		return -1;
	*others -= 1;
	g->switch_left = last >= 0 ? SIM_SWITCH_NS : 0;
	g->serves = next;
	g->generation = st->slot[next].generation;
	g->slice_left = slice_of(next, gpu);
	*others += last >= 0 && wants(&st->slot[last], gpu);
	return next;
}

/* Brings all clocks of a GPU up to now. */
static void advance(int gpu, uint64_t now)
{
	struct sim_gpu *g = &st->gpu[gpu];

	while (g->at < now) {
		uint64_t step = now - g->at;
		int others, served = serve(g, gpu, &others), idle = served < 0;

		for (uint32_t i = 0; i < st->high; i++) { /* not beyond where a gap ends */
			const struct sim_slot_gpu *s = &st->slot[i].gpu[gpu];

			if (st->slot[i].used && has_work(s) && !s->off && in_gap(s)) {
				idle = 0;
				if (s->gap_to - s->v < step)
					step = s->gap_to - s->v;
			}
		}
		if (served >= 0 && g->switch_left) {
			if (g->switch_left < step)
				step = g->switch_left;
		} else if (served >= 0) {
			const struct sim_slot_gpu *s = &st->slot[served].gpu[gpu];
			uint64_t end = s->v < s->gap_from && s->gap_from < s->gap_to ? s->gap_from : s->tail[SIM_COMPUTE];

			if (end - s->v < step)
				step = end - s->v;
			if (others && g->slice_left < step)
				step = g->slice_left;
		}
		for (uint32_t i = 0; !idle && i < st->high; i++) {
			struct sim_slot_gpu *s = &st->slot[i].gpu[gpu];

			if (!st->slot[i].used || !has_work(s))
				continue;
			if ((!s->off && in_gap(s)) || ((int)i == served && !g->switch_left)) {
				goes(s, g->at);
				s->v += step;
			} else {
				stood_still(&st->slot[i], gpu, g->at, step);
			}
		}
		if (idle) /* those whose channels are off */
			for (uint32_t i = 0; i < st->high; i++)
				if (st->slot[i].used && has_work(&st->slot[i].gpu[gpu]))
					stood_still(&st->slot[i], gpu, g->at, step);
		if (served >= 0 && g->switch_left)
			g->switch_left -= step;
		else if (served >= 0) /* who is alone begins one slice after the other */
			g->slice_left = g->slice_left > step
						? g->slice_left - step
						: others ? 0 : slice_of(served, gpu) - (step - g->slice_left) % slice_of(served, gpu);
		g->at += step;
	}
}

/* Locked: this process's clock, brought up to now. */
static uint64_t own_clock(int gpu, uint64_t now)
{
	struct sim_slot_gpu *s = &st->slot[self].gpu[gpu];

	advance(gpu, now);
	return has_work(s) ? s->v : now;
}

uint64_t sim_clock(int clock)
{
	uint64_t now, v;

	if (!clock)
		return sim_now();
	lock();
	now = sim_now();
	v = self < 0 ? UINT64_MAX : own_clock(clock - 1, now);
	unlock();
	return v;
}

uint64_t sim_day(struct sim_time t, int end)
{
	uint64_t day = t.ns;

	if (!t.clock)
		return day;
	lock();
	if (self >= 0) {
		const struct sim_slot_gpu *s = &st->slot[self].gpu[t.clock - 1];

		for (uint32_t k = 0; k < SIM_SEGMENTS && k < s->segments; k++) {
			const struct sim_segment *g = &s->segment[(s->segments - 1 - k) % SIM_SEGMENTS];

			day = g->t + (t.ns - g->v);
			if (g->v < t.ns || (g->v == t.ns && !end))
				break;
		}
	}
	unlock();
	return day;
}

uint64_t sim_still(struct sim_time from, uint64_t to, uint64_t *began)
{
	uint64_t longest = 0;

	*began = 0;
	lock();
	if (self >= 0 && from.clock) {
		const struct sim_slot_gpu *s = &st->slot[self].gpu[from.clock - 1];

		for (uint32_t k = 0; k + 1 < SIM_SEGMENTS && k + 1 < s->segments; k++) {
			const struct sim_segment *g = &s->segment[(s->segments - 1 - k) % SIM_SEGMENTS];
			const struct sim_segment *before = &s->segment[(s->segments - 2 - k) % SIM_SEGMENTS];
			uint64_t stood = before->t + (g->v - before->v);

			if (g->v > from.ns && g->v < to && g->t - stood > longest) {
				longest = g->t - stood;
				*began = stood;
			}
		}
	}
	unlock();
	return longest;
}

struct sim_time sim_later(struct sim_time a, struct sim_time b)
{
	uint64_t now, v;

	if (a.clock == b.clock || !a.ns || !b.ns)
		return a.ns > b.ns ? a : b;
	if (!b.clock) { /* a: of the day */
		struct sim_time t = a;

		a = b;
		b = t;
	}
	lock();
	now = sim_now();
	v = self < 0 ? UINT64_MAX : own_clock(b.clock - 1, now);
	unlock();
	if (b.ns <= v)
		return a;
	/* the clock does not go faster than the day: at the latest then */
	if (a.ns > now && v + (a.ns - now) > b.ns)
		b.ns = v + (a.ns - now);
	return b;
}

uint64_t sim_soonest(struct sim_time t)
{
	uint64_t now, v, soonest = t.ns;

	if (!t.clock)
		return soonest;
	lock();
	now = soonest = sim_now();
	if (self >= 0) {
		int others, gpu = t.clock - 1;

		v = own_clock(gpu, now);
		if (t.ns > v) {
			soonest = now + (t.ns - v);
			if (st->slot[self].gpu[gpu].off || serve(&st->gpu[gpu], gpu, &others) != self)
				soonest = soonest > now + LOOK_NS ? soonest : now + LOOK_NS;
		}
	}
	unlock();
	return soonest;
}

void sim_set_off(int gpu, int off)
{
	lock();
	if (self >= 0) {
		struct sim_slot_gpu *s = &st->slot[self].gpu[gpu];

		advance(gpu, sim_now());
		s->times_on += s->off && !off;
		s->off = (uint32_t)off;
	}
	unlock();
}

int sim_is_off(int gpu, uint32_t *times_on)
{
	int off = 0;

	*times_on = 0;
	if (self >= 0) {
		off = (int)__atomic_load_n(&st->slot[self].gpu[gpu].off, __ATOMIC_ACQUIRE);
		*times_on = __atomic_load_n(&st->slot[self].gpu[gpu].times_on, __ATOMIC_ACQUIRE);
	}
	return off;
}

void sim_set_slice(int gpu, uint64_t ns)
{
	lock();
	if (self >= 0) {
		advance(gpu, sim_now());
		st->slot[self].gpu[gpu].slice = ns;
		if (st->gpu[gpu].serves == self)
			st->gpu[gpu].slice_left = ns ? ns : SIM_SLICE_NS;
	}
	unlock();
}

/* ---- submission ---- */

/* Compute work, by the clock of the process. */
static uint64_t submit_compute(int gpu, int kind, uint64_t now, struct sim_time after, uint64_t ns, uint64_t *start)
{
	struct sim_slot_gpu *s = &st->slot[self].gpu[gpu];
	uint64_t v = own_clock(gpu, now), begin = v, busy;

	if (!has_work(s)) { /* the clock shows the day again */
		s->v = v;
		s->gap_from = s->gap_to = 0;
		goes(s, now);
		s->tail[SIM_COMPUTE] = v;
	}
	if (after.clock == 1 + gpu && after.ns > begin)
		begin = after.ns;
	else if (!after.clock && after.ns > now && v + (after.ns - now) > begin)
		begin = v + (after.ns - now); /* not before that: the clock goes no faster than the day */
	busy = s->tail[SIM_COMPUTE];
	if (busy > begin)
		begin = busy;
	if (begin > busy && s->gap_to <= v) { /* a second gap is held to be work */
		s->gap_from = busy;
		s->gap_to = begin;
	}
	s->tail[SIM_COMPUTE] = begin + ns;
	record_work(gpu, kind, now, now + (begin - v), now + (begin + ns - v));
	*start = begin;
	return begin + ns;
}

struct sim_time sim_submit(int gpu, int engine, int kind, struct sim_time after, uint64_t ns, uint64_t *start)
{
	uint64_t now, v, begin, ahead = 0;
	struct sim_time end = { 0, 0 };

	lock();
	if (self < 0) { /* the process is past exit(): nothing runs any more */
		unlock();
		*start = after.ns;
		return after;
	}
	now = sim_now();
	if (now - st->swept > SWEEP_NS) {
		st->swept = now;
		bury_dead();
		now = sim_now(); /* after the deaths in the log */
	} else if (bury_pending(gpu, now)) {
		now = sim_now();
	}
	if (engine == SIM_COMPUTE) {
		end = (struct sim_time){ submit_compute(gpu, kind, now, after, ns, start), 1 + gpu };
		unlock();
		return end;
	}
	for (uint32_t i = 0; i < st->high; i++)
		if (st->slot[i].used && st->slot[i].gpu[gpu].tail[engine] > now + ahead)
			ahead = st->slot[i].gpu[gpu].tail[engine] - now;
	v = after.clock ? own_clock(after.clock - 1, now) : now;
	begin = v + ahead > after.ns ? v + ahead : after.ns;
	if (after.clock && begin == v + ahead && after.ns <= v) {
		after.clock = 0; /* what it waits for is over: it goes by the day */
		begin = now + ahead;
		v = now;
	}
	st->slot[self].gpu[gpu].tail[engine] = now + (begin - v) + ns;
	record_work(gpu, kind, now, now + (begin - v), now + (begin - v) + ns);
	unlock();
	*start = begin;
	end = (struct sim_time){ begin + ns, after.clock };
	return end;
}

static uint64_t used_locked(int gpu)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < st->high; i++)
		if (st->slot[i].used)
			sum += st->slot[i].gpu[gpu].memory;
	return sum;
}

int sim_charge(int gpu, uint64_t bytes)
{
	int rc = -1;

	lock();
	if (self >= 0 && bytes <= st->memory) {
		if (used_locked(gpu) > st->memory - bytes)
			bury_dead();
		if (used_locked(gpu) <= st->memory - bytes) {
			st->slot[self].gpu[gpu].memory += bytes;
			rc = 0;
		}
	}
	unlock();
	return rc;
}

void sim_uncharge(int gpu, uint64_t bytes)
{
	lock();
	if (self >= 0)
		st->slot[self].gpu[gpu].memory -= bytes;
	unlock();
}

uint64_t sim_used(int gpu)
{
	uint64_t sum;

	lock();
	bury_dead();
	sum = used_locked(gpu);
	unlock();
	return sum;
}

void sim_count_context(int gpu, int delta)
{
	lock();
	if (self >= 0)
		st->slot[self].gpu[gpu].contexts += (uint32_t)delta;
	unlock();
}

int sim_users(int gpu, struct sim_user *out, int n)
{
	int found = 0;
	uint32_t pid;

	lock();
	for (uint32_t i = 0; i < st->high; i++) {
		const struct sim_slot_gpu *g = &st->slot[i].gpu[gpu];

		if (!st->slot[i].used || !(g->contexts || g->memory))
			continue;
		if (!held((int)i, &pid) || !pid) /* dead, or of a pid namespace not below ours */
			continue;
		if (found < n)
			out[found] = (struct sim_user){ pid, g->memory };
		found++;
	}
	unlock();
	return found;
}

int sim_busy(int gpu)
{
	uint64_t now = sim_now();
	int busy = 0;

	lock();
	bury_pending(gpu, now);
	advance(gpu, now);
	for (uint32_t i = 0; i < st->high; i++)
		busy |= st->slot[i].used && has_work(&st->slot[i].gpu[gpu]);
	unlock();
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
