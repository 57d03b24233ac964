// SPDX-License-Identifier: Apache-2.0
/*
 * rm.c: see rm.h. Requests, classes and layouts are those of the real RM
 * (../../hook/rm/rm_abi.h names the sources). Differences from it:
 *
 * - The GPU runs the work of a process as a whole: it stands still while all
 *   compute channels of the process there are off, and has the slice that was
 *   set last on one of its compute groups.
 * - Taking channels off takes 0.55 ms and putting them on 0.29, always.
 * - Who has a copy of the descriptor is that client, as with the real one. But this RM
 *   is a thread of the process itself: a process that is stopped does not answer others.
 */
#include "rm.h"

#include "driver.h"
#include "rm_abi.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define OFF_NS 550000
#define ON_NS  290000
#define MAX_OBJECTS 4096

enum { COMPUTE_CHANNELS = 8, COPY_GROUPS = 3, FIRST_COPY = 9 };
#define BAD_ARGUMENT 0x1fu
#define BAD_CLIENT   0x23u
#define GET_TOKEN    0xc36f0108u /* of a channel */
#define NO_ROOM      0x51u
#define EXISTS       0x34u

/* ---- the kernel's side ---- */

struct object {
	uint32_t client, handle, parent, class, engine;
	int gpu;
	uint64_t slice_us;
	int off; /* how often it was taken off, less how often put on */
	int live;
};

static pthread_mutex_t rm_mu = PTHREAD_MUTEX_INITIALIZER; /* never held over anything else */
static struct object objects[MAX_OBJECTS];
static int rm_fd = -1, rm_kernel = -1; /* both ends of a socket */
static dev_t rm_device;
static ino_t rm_inode;
static _Thread_local int reached; /* a request of this thread has come to the kernel */

enum mode { ON, ABSENT, REFUSED, FAKED, IGNORED, HIDDEN };

static enum mode mode(void)
{
	static const char *const names[] = { "on", "absent", "refused", "faked", "ignored", "hidden" };
	const char *e = getenv("NVSHARE_SIMGPU_RM");

	for (int i = ON; e && i <= HIDDEN; i++)
		if (!strcmp(e, names[i]))
			return (enum mode)i;
	return ON;
}

static struct object *find(uint32_t client, uint32_t handle)
{
	for (int i = 0; i < MAX_OBJECTS; i++)
		if (objects[i].live && objects[i].client == client && objects[i].handle == handle)
			return &objects[i];
	return NULL;
}

static int is_compute_channel(const struct object *o)
{
	const struct object *group = o->live && RM_IS_CHANNEL(o->class) ? find(o->client, o->parent) : NULL;

	return group && RM_IS_COMPUTE(group->engine);
}

/* Whether all compute channels of a GPU are off: then its work stands still. */
static int all_off(int gpu)
{
	int off = 0;

	for (int i = 0; i < MAX_OBJECTS; i++)
		if (objects[i].gpu == gpu && is_compute_channel(&objects[i])) {
			if (!objects[i].off)
				return 0;
			off = 1;
		}
	return off;
}

static void free_below(struct object *o)
{
	o->live = 0;
	for (int i = 0; i < MAX_OBJECTS; i++)
		if (objects[i].live && objects[i].client == o->client && objects[i].parent == o->handle)
			free_below(&objects[i]);
}

static uint32_t kernel_alloc(const struct rm_alloc *a)
{
	struct object *o = objects, *parent = find(a->client, a->parent);

	while (o < objects + MAX_OBJECTS && o->live)
		o++;
	if (o == objects + MAX_OBJECTS)
		return NO_ROOM;
	if (find(a->client, a->object))
		return EXISTS;
	if (a->class != 0x41 && !parent)
		return RM_NO_OBJECT;
	*o = (struct object){ .client = a->client, .handle = a->object, .parent = a->parent, .class = a->class,
			      .gpu = parent ? parent->gpu : -1, .slice_us = SIM_SLICE_NS / 1000, .live = 1 };
	if (a->class == RM_CLASS_DEVICE)
		o->gpu = (int)*(const uint32_t *)(uintptr_t)a->params;
	if (a->class == RM_CLASS_GROUP)
		o->engine = ((const struct rm_group_params *)(uintptr_t)a->params)->engine;
	return 0;
}

static void sleep_ns(long ns)
{
	nanosleep(&(struct timespec){ 0, ns }, NULL);
}

/* What the control does to the engine is done without the lock. */
static uint32_t kernel_channels(const struct rm_channels *c, enum mode m, int gpu)
{
	uint32_t status = 0;
	int off;

	if (c->event)
		return RM_NOT_PERMITTED;
	if (c->count > RM_CHANNELS_MAX)
		return BAD_ARGUMENT;
	if (m == FAKED || m == IGNORED)
		return 0;
	if (c->disable)
		sleep_ns(OFF_NS);
	else
		sleep_ns(ON_NS);
	pthread_mutex_lock(&rm_mu);
	for (uint32_t i = 0; i < c->count; i++) {
		struct object *o = find(c->client[i], c->channel[i]);

		if (o && RM_IS_CHANNEL(o->class) && o->gpu == gpu)
			o->off += c->disable ? 1 : o->off ? -1 : 0; /* the real one counts as well */
		else
			status = RM_NO_OBJECT;
	}
	off = all_off(gpu);
	pthread_mutex_unlock(&rm_mu);
	sim_set_off(gpu, off);
	if (off)
		work_settle(gpu); /* what is over is over when the control ends */
	return status;
}

static uint32_t kernel_slice(struct rm_slice *s, int set, enum mode m, struct object *o)
{
	uint64_t us = 0;

	pthread_mutex_lock(&rm_mu);
	if (!set)
		s->us = o->slice_us;
	else if (m != FAKED)
		us = o->slice_us = s->us;
	pthread_mutex_unlock(&rm_mu);
	if (set && !s->us)
		return BAD_ARGUMENT;
	if (us && m != IGNORED && RM_IS_COMPUTE(o->engine))
		sim_set_slice(o->gpu, us * 1000);
	return 0;
}

static uint32_t kernel_control(const struct rm_control *c)
{
	void *params = (void *)(uintptr_t)c->params;
	enum mode m = mode();
	struct object *client, *o;

	pthread_mutex_lock(&rm_mu);
	client = find(c->client, c->client);
	o = find(c->client, c->object);
	pthread_mutex_unlock(&rm_mu);
	if (!client)
		return BAD_CLIENT;
	if (!o)
		return RM_NO_OBJECT;
	if (c->command == GET_TOKEN && RM_IS_CHANNEL(o->class))
		return 0;
	if (c->command == RM_GET_UUID && o->class == RM_CLASS_SUBDEVICE && c->params_size == sizeof(struct rm_uuid)) {
		struct rm_uuid *u = params;

		u->length = 16;
		sim_uuid_raw(sim_at(o->gpu), u->data);
		return u->flags == RM_UUID_BINARY ? 0 : BAD_ARGUMENT;
	}
	if (m == ABSENT)
		return RM_NOT_SUPPORTED;
	if (m == REFUSED && c->command != RM_GET_SLICE)
		return RM_NOT_PERMITTED;
	if ((c->command == RM_GET_SLICE || c->command == RM_SET_SLICE) && o->class == RM_CLASS_GROUP)
		return c->params_size == sizeof(struct rm_slice) ? kernel_slice(params, c->command == RM_SET_SLICE, m, o)
								  : BAD_ARGUMENT;
	if (c->command == RM_CHANNELS && o->class == RM_CLASS_SUBDEVICE)
		return c->params_size == sizeof(struct rm_channels) ? kernel_channels(params, m, o->gpu) : BAD_ARGUMENT;
	return RM_NOT_SUPPORTED;
}

static uint32_t kernel_free(const struct rm_free *f)
{
	struct object *o;
	int gpu = -1, off = 0;

	pthread_mutex_lock(&rm_mu);
	o = find(f->client, f->object);
	if (o) {
		gpu = o->gpu;
		free_below(o);
		off = gpu >= 0 && all_off(gpu);
	}
	pthread_mutex_unlock(&rm_mu);
	if (gpu >= 0)
		sim_set_off(gpu, off);
	return o ? 0 : RM_NO_OBJECT;
}

static int kernel(unsigned long request, void *arg)
{
	uint32_t status;

	reached = 1;
	switch (request) {
	case RM_ALLOC:
	case RM_ALLOC_RIGHTS: /* begins with the same fields */
		pthread_mutex_lock(&rm_mu);
		status = kernel_alloc(arg);
		pthread_mutex_unlock(&rm_mu);
		if (!status && RM_IS_CHANNEL(((struct rm_alloc *)arg)->class)) {
			struct object *o;

			pthread_mutex_lock(&rm_mu);
			o = find(((struct rm_alloc *)arg)->client, ((struct rm_alloc *)arg)->object);
			pthread_mutex_unlock(&rm_mu);
			if (o)
				sim_set_off(o->gpu, 0); /* a channel that is on */
		}
		*(request == RM_ALLOC ? &((struct rm_alloc *)arg)->status
				      : &((struct rm_alloc_rights *)arg)->status) = status;
		return 0;
	case RM_FREE:
		((struct rm_free *)arg)->status = kernel_free(arg);
		return 0;
	case RM_CONTROL:
		((struct rm_control *)arg)->status = kernel_control(arg);
		return 0;
	case RM_VERSION:
		((struct rm_version *)arg)->reply = 1;
		return 0;
	}
	errno = EINVAL;
	return -1;
}

/*
 * By the system call: a library that interposes fstat may have ended before this one
 * (libfaketime does).
 */
static int status_of(int fd, struct stat *st)
{
	return (int)syscall(SYS_fstat, fd, st);
}

static int is_ours(int fd)
{
	struct stat st;

	return fd >= 0 && fd == rm_fd && !status_of(fd, &st) && st.st_dev == rm_device && st.st_ino == rm_inode;
}

SIM_EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	return RM_IS_REQUEST(request) && is_ours(fd) ? kernel(request, arg) : (int)syscall(SYS_ioctl, fd, request, arg);
}

/* ---- other processes ---- */

/*
 * Who copied the descriptor (pidfd_getfd) sends a control on it, and a socket for the answer,
 * so that the answers to two who have copies are not mixed up.
 */
struct outside {
	uint32_t client, object, command, size;
	uint8_t params[1024];
};

static int receive(struct outside *o, ssize_t *length)
{
	char room[CMSG_SPACE(sizeof(int))];
	struct iovec io = { o, sizeof *o };
	struct msghdr m = { .msg_iov = &io, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room };
	struct cmsghdr *c;
	int fd = -1;

	*length = recvmsg(rm_kernel, &m, MSG_CMSG_CLOEXEC);
	c = *length > 0 ? CMSG_FIRSTHDR(&m) : NULL;
	if (c && c->cmsg_type == SCM_RIGHTS)
		memcpy(&fd, CMSG_DATA(c), sizeof fd);
	return fd;
}

static void *serve_others(void *unused)
{
	ssize_t length = 1;

	(void)unused;
	while (length > 0 || (length < 0 && errno == EINTR)) {
		struct outside o = { 0 };
		int answer = receive(&o, &length);

		if (answer < 0)
			continue;
		if (length >= 16 && o.size == (size_t)length - 16) {
			struct rm_control c = { .client = o.client, .object = o.object, .command = o.command,
						.params = (uintptr_t)o.params, .params_size = o.size };
			uint32_t status = kernel_control(&c);
			struct iovec io[] = { { &status, sizeof status }, { o.params, o.size } };
			struct msghdr m = { .msg_iov = io, .msg_iovlen = 2 };

			sendmsg(answer, &m, MSG_NOSIGNAL);
		}
		close(answer);
	}
	return NULL;
}

/* The file in the directory says who may open the GPU; the socket is what is opened. */
static int open_rm(void)
{
	static const char name[] = "nvshare-simgpu nvidiactl";
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	sigset_t all, before;
	pthread_t thread;
	int pair[2], fd = sim_open_file("nvidiactl", O_RDWR | O_CREAT), failed;

	if (fd < 0)
		return -1;
	close(fd);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return -1;
	snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%s %d %llx", name, getpid(), (unsigned long long)sim_now());
	(void)!bind(pair[0], (struct sockaddr *)&a, sizeof a); /* so that a copy is known by its name */
	rm_kernel = pair[1];
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	failed = pthread_create(&thread, NULL, serve_others, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!failed)
		pthread_detach(thread);
	return pair[0];
}

/* ---- the driver's side ---- */

/* Numbers are close to each other, as libcuda's are. */
#define CLIENT        0xc1d00001u
#define FIRST_OBJECT  0x5c000000u
#define DEVICE_OF(g)  (FIRST_OBJECT + 4 * (uint32_t)(g))
#define SUB_OF(g)     (DEVICE_OF(g) + 3)
#define CONTEXT_OF(n) (FIRST_OBJECT + 4 * SIM_MAX_GPUS + 64 * (uint32_t)(n))

static int has_device[SIM_MAX_GPUS];

/* As libcuda asks: by the ioctl that programs see first. If that does not lead here, straight. */
static uint32_t request(unsigned long number, void *arg, uint32_t *status)
{
	int (*first)(int, unsigned long, ...) = NULL;

	if (rm_fd < 0)
		return NO_ROOM;
	reached = 0;
	if (mode() != HIDDEN)
		*(void **)&first = dlsym(RTLD_DEFAULT, "ioctl");
	if (first)
		first(rm_fd, number, arg);
	if (!reached)
		kernel(number, arg);
	return *status;
}

static void alloc(uint32_t parent, uint32_t handle, uint32_t class, uint32_t param)
{
	struct rm_group_params p = { .engine = param };
	uint32_t device = param;

	if (class == RM_CLASS_GROUP) { /* the older form, as the driver uses both */
		struct rm_alloc a = { CLIENT, parent, handle, class, (uintptr_t)&p, sizeof p, 0 };

		request(RM_ALLOC, &a, &a.status);
	} else {
		struct rm_alloc_rights a = { CLIENT, parent, handle, class, (uintptr_t)&device, 0, 4, 0, 0 };

		request(RM_ALLOC_RIGHTS, &a, &a.status);
	}
}

static void release(uint32_t handle)
{
	struct rm_free f = { CLIENT, 0, handle, 0 };

	request(RM_FREE, &f, &f.status);
}

void rm_open(void)
{
	const char *version = getenv("NVSHARE_SIMGPU_VERSION");
	struct rm_version v = { .text = "580.159.04" };
	struct stat st;

	rm_fd = open_rm();
	if (rm_fd < 0 || status_of(rm_fd, &st)) {
		rm_fd = -1;
		return;
	}
	rm_device = st.st_dev;
	rm_inode = st.st_ino;
	if (version && *version)
		snprintf(v.text, sizeof v.text, "%s", version);
	if (strcmp(v.text, "none") != 0) /* as libcuda without NVML */
		request(RM_VERSION, &v, &v.reply);
	alloc(CLIENT, CLIENT, 0x41, 0);
}

void rm_close(void)
{
	release(CLIENT);
}

void rm_fork_child(void)
{
	pthread_mutex_init(&rm_mu, NULL);
	if (rm_kernel >= 0) { /* else others would wait for the thread that is not here */
		close(rm_kernel);
		rm_kernel = -1;
	}
	rm_fd = -1;
}

uint32_t rm_make_context(int gpu)
{
	uint32_t context;
	int n = 0;

	pthread_mutex_lock(&rm_mu);
	while (find(CLIENT, CONTEXT_OF(n)))
		n++;
	pthread_mutex_unlock(&rm_mu);
	context = CONTEXT_OF(n);

	if (!has_device[gpu]) {
		has_device[gpu] = 1;
		alloc(CLIENT, DEVICE_OF(gpu), RM_CLASS_DEVICE, (uint32_t)gpu);
		alloc(DEVICE_OF(gpu), SUB_OF(gpu), RM_CLASS_SUBDEVICE, 0);
	}
	alloc(DEVICE_OF(gpu), context, RM_CLASS_GROUP, 1);
	for (uint32_t i = 1; i <= COMPUTE_CHANNELS; i++)
		alloc(context, context + i, 0xc86f, 0);
	for (uint32_t g = 0; g < COPY_GROUPS; g++) {
		uint32_t group = context + 0x10 + 8 * g;

		alloc(DEVICE_OF(gpu), group, RM_CLASS_GROUP, FIRST_COPY + g);
		alloc(group, group + 1, 0xc86f, 0);
	}
	return context;
}

void rm_free_context(uint32_t context)
{
	release(context);
	for (uint32_t g = 0; g < COPY_GROUPS; g++)
		release(context + 0x10 + 8 * g);
}
