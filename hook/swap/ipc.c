// SPDX-License-Identifier: Apache-2.0
/*
 * ipc.c: cuIpc* for memory that moves; the driver has no such handles for it.
 *
 * The handle that the application passes on holds the name of a socket of the process
 * that owns the memory, and a secret. The process that opens the handle, through the shim
 * as well, gets descriptors of the chunks over that socket and maps them; only a process
 * of the same user does. From the first handle on the memory is pinned: nobody could
 * tell the other processes when it leaves.
 *
 * An abstract socket belongs to a network namespace. Processes that share memory share
 * that: those of a container, or of a pod.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "connection.h"
#include "descriptor.h"
#include "futex.h"
#include "gate.h"
#include "packet.h"
#include "signals.h"
#include "stream.h"
#include "swap.h"
#include "swap_impl.h"
#include "thread.h"

#define IPC_MAGIC  0x3143504948534e56ull /* "VNSHIPC1" */
#define BATCH      16 /* descriptors in a packet */
#define ANSWER_NS  (10 * NVS_S)
#define MAX_OPENED 1024
#define CONNECT_NAP_NS (20 * NVS_MS)
#define ANEW_NS        (500 * NVS_MS) /* a process that has to make its socket anew (keep_listener) refuses for so long */

/* The contents of a handle. */
struct ticket {
	uint64_t magic;
	uint64_t name, secret; /* of the socket, of the process */
	uint64_t region;       /* its address in that process */
	uint64_t region_bytes;
	uint64_t offset;       /* of the allocation in the region */
	uint64_t bytes;
	uint64_t pinned;       /* of the region: later ones may have its address */
};
_Static_assert(sizeof(struct ticket) == sizeof(struct cu_ipc_handle), "CUipcMemHandle");

struct reply { /* comes with `count` descriptors */
	uint32_t count, more;
	uint32_t granules[BATCH];
};

static struct nvs_lock lock = NVS_LOCK(NVS_RANK_IPC);
static uint64_t own_name, own_secret; /* 0: there is no socket yet */
static struct nvs_descriptor listener = NVS_NO_DESCRIPTOR; /* only its thread changes it */

/* Memory of other processes that is open in this one. */
static struct opened {
	uint64_t name, region, pinned;
	CUdeviceptr base;     /* 0: free */
	uint64_t bytes;
	unsigned references;
	uint64_t devices;     /* that may use it, a bit each */
	void *ctx;            /* in which it was opened */
} opened[MAX_OPENED];
static atomic_uint opened_used;

/* ---- sockets; no cancellation points while the lock is held ---- */

static socklen_t address_of_name(uint64_t name, struct sockaddr_un *a)
{
	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	/* A leading zero byte: not in the file system. */
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			   (size_t)snprintf(a->sun_path + 1, sizeof(a->sun_path) - 1,
					    "nvshare-ipc-%016llx", (unsigned long long)name));
}

static bool same_user(int fd)
{
	struct ucred peer;
	socklen_t n = sizeof(peer);

	return syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 &&
	       (peer.uid == (uid_t)syscall(SYS_geteuid) || peer.uid == 0);
}

/* Waits for POLLIN or POLLOUT: the peer may be stopped. */
static bool ipc_ready(int fd, short events)
{
	struct pollfd p = { .fd = fd, .events = events };
	struct timespec t = { ANSWER_NS / NVS_S, 0 };

	return syscall(SYS_ppoll, &p, 1, &t, NULL, 8) > 0;
}

/* ---- export ---- */

/* Sends the descriptors of a region's chunks, packet by packet. */
static bool send_chunks(int fd, struct place p)
{
	const struct region *r = region_of(p);
	struct nvs_swap *s = p.span->gpu->swap;
	uint32_t i = 0;
	bool ok = true;

	while (ok && i < r->granules) {
		struct reply reply = { 0 };
		int fds[BATCH];

		for (; ok && i < r->granules && reply.count < BATCH; i += r->piece) {
			struct chunk *chunk = &p.span->chunk[p.granule + i];
			bool here;

			nvs_swap_lock(s);
			here = chunk->state == CHUNK_HERE && !r->dying && r->pinned;
			nvs_swap_unlock(s);
			/* A pinned region stays until the application frees it, as with the driver. */
			ok = here && nvs_memory_driver.mem_export(&fds[reply.count], chunk->handle,
							   CU_MEM_HANDLE_POSIX_FD, 0) == CUDA_SUCCESS;
			if (ok)
				reply.granules[reply.count++] = chunk->granules;
		}
		reply.more = i < r->granules;
		ok = ok && ipc_ready(fd, POLLOUT) && nvs_packet_send(fd, &reply, sizeof(reply), fds, reply.count);
		while (reply.count)
			close(fds[--reply.count]);
	}
	return ok;
}

static void serve(int fd)
{
	struct ticket t;
	struct place p;

	if (!same_user(fd) || !ipc_ready(fd, POLLIN) ||
	    syscall(SYS_recvfrom, fd, &t, sizeof(t), MSG_DONTWAIT, NULL, NULL) != (long)sizeof(t) ||
	    t.magic != IPC_MAGIC || t.secret != own_secret)
		return;
	p = nvs_place_of(t.region);
	if (p.span && p.span->head[p.granule] == p.granule + 1 &&
	    bytes_of(region_of(p)->granules) == t.region_bytes && region_of(p)->pinned == t.pinned)
		send_chunks(fd, p);
}

/* Creates the socket of the process's own name. */
static bool make_listener(void)
{
	struct sockaddr_un a;
	socklen_t n = address_of_name(own_name, &a);
	struct nvs_descriptor d = nvs_descriptor_of(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));

	if (syscall(SYS_bind, d.fd, &a, n) != 0 || syscall(SYS_listen, d.fd, 64) != 0) {
		nvs_descriptor_close(&d);
		return false;
	}
	listener = d;
	return true;
}

/* The application may have closed the socket. Handles name it, so the next one has the same name. */
static bool keep_listener(void)
{
	return nvs_descriptor_is(&listener) || make_listener();
}

static void *ipc_main(void *arg)
{
	(void)arg;
	nvs_thread_setup("nvshare-ipc");
	while (!atomic_load(&nvs_exiting)) {
		struct nvs_descriptor c = NVS_NO_DESCRIPTOR;

		if (keep_listener())
			c = nvs_descriptor_of((int)syscall(SYS_accept4, listener.fd, NULL, NULL, SOCK_CLOEXEC));
		if (c.fd < 0) {
			nvs_nap(CONNECT_NAP_NS); /* no descriptor is left, or the name is not free yet */
		} else if (nvs_driver_enter()) {
			keep_listener(); /* before the peer has its answer, and may connect again */
			serve(c.fd);
			nvs_driver_leave();
		}
		nvs_descriptor_close(&c);
	}
	return NULL;
}

/* Creates the socket and its thread, once. The lock is held. */
static bool listening(void)
{
	uint64_t random[2] = { 0, 0 };

	if (own_name)
		return true;
	if (syscall(SYS_getrandom, random, sizeof(random), 0) != (long)sizeof(random))
		return false;
	own_secret = random[1];
	own_name = random[0] ? random[0] : 1;
	if (make_listener() && nvs_thread_start(ipc_main, NULL))
		return true;
	nvs_descriptor_close(&listener);
	own_name = 0;
	return false;
}

/* Pins the region of an address, and returns its number. The caller keeps its memory on the GPU meanwhile. */
static uint32_t pin(CUdeviceptr address)
{
	static _Atomic uint32_t last;
	struct place p = nvs_place_of(address);
	struct nvs_swap *s = p.span->gpu->swap;
	uint32_t number = 0;
	struct region *r;

	nvs_swap_lock(s);
	r = p.span->head[p.granule] ? &p.span->region[p.span->head[p.granule] - 1] : NULL;
	if (r && !r->pinned) {
		r->pinned = ++last;
		s->pinned += bytes_of(r->granules);
	}
	number = r ? r->pinned : 0;
	nvs_swap_unlock(s);
	return number;
}

bool nvs_swap_pin(CUdeviceptr address, struct nvs_swap_range *r)
{
	struct nvs_thread *t;

	if (!nvs_swap_find(address, r) || !r->base || r->mapping)
		return false;
	t = nvs_gate_enter_memory(r->gpu);
	r->pinned = pin(address);
	if (t)
		nvs_gate_leave(t);
	return true;
}

int nvs_ipc_export(struct cu_ipc_handle *handle, CUdeviceptr p)
{
	struct ticket t = { .magic = IPC_MAGIC };
	struct nvs_swap_range r;
	struct nvs_signals q;
	bool ok;

	if (!handle || !nvs_swap_find(p, &r) || r.mapping)
		return -1;
	if (!nvs_swap_pin(p, &r))
		return CUDA_ERROR_INVALID_VALUE;
	nvs_signals_block(&q);
	nvs_lock(&lock);
	ok = listening();
	t.name = own_name;
	t.secret = own_secret;
	nvs_unlock(&lock);
	nvs_signals_restore(&q);
	if (!ok)
		return CUDA_ERROR_OUT_OF_MEMORY;
	t.region = r.mapped;
	t.region_bytes = r.mapped_bytes;
	t.offset = r.base - r.mapped;
	t.bytes = r.bytes;
	t.pinned = r.pinned;
	memcpy(handle, &t, sizeof(t));
	return CUDA_SUCCESS;
}

/* ---- import ---- */

/* Imports and maps the chunks of a packet. Closes the descriptors. */
static bool map_batch(const struct reply *r, const int *fds, CUdeviceptr base, uint64_t *at,
		      uint64_t end)
{
	bool ok = true;

	for (uint32_t i = 0; i < r->count; i++) {
		unsigned long long handle = 0;
		uint64_t bytes = bytes_of(r->granules[i]);

		ok = ok && bytes && *at + bytes <= end &&
		     nvs_memory_driver.mem_import(&handle, (void *)(intptr_t)fds[i],
							      CU_MEM_HANDLE_POSIX_FD) == CUDA_SUCCESS;
		if (ok) {
			ok = nvs_memory_driver.mem_map(base + *at, bytes, 0, handle, 0) == CUDA_SUCCESS;
			nvs_memory_driver.mem_release(handle); /* the mapping keeps the memory */
			*at += ok ? bytes : 0;
		}
		close(fds[i]);
	}
	return ok;
}

/* Receives a packet. False: what came is none. */
static bool ipc_receive(int fd, struct reply *r, int *fds)
{
	unsigned got = BATCH;

	if (!ipc_ready(fd, POLLIN) || nvs_packet_receive(fd, r, sizeof(*r), fds, &got) != 1)
		return false;
	if (got == r->count && got)
		return true;
	while (got)
		close(fds[--got]);
	return false;
}

/* EAGAIN: more wait for the process than its socket takes, or it is stopped. */
static bool connected(int fd, const struct sockaddr_un *a, socklen_t n)
{
	uint64_t start = nvs_now();
	long result;

	while ((result = syscall(SYS_connect, fd, a, n)) != 0 &&
	       nvs_elapsed(nvs_now(), start) < (errno == EAGAIN ? ANSWER_NS : errno == ECONNREFUSED ? ANEW_NS : 0))
		nvs_nap(CONNECT_NAP_NS);
	return result == 0;
}

static bool fetch(const struct ticket *t, CUdeviceptr base, uint64_t *mapped)
{
	struct sockaddr_un a;
	socklen_t n = address_of_name(t->name, &a);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), fds[BATCH];
	struct reply r = { .more = 1 };
	bool ok;

	if (fd < 0)
		return false;
	ok = connected(fd, &a, n) && same_user(fd) &&
	     syscall(SYS_sendto, fd, t, sizeof(*t), MSG_NOSIGNAL, NULL, 0) == (long)sizeof(*t);
	while (ok && r.more)
		ok = ipc_receive(fd, &r, fds) && map_batch(&r, fds, base, mapped, t->region_bytes);
	close(fd);
	return ok && *mapped == t->region_bytes;
}

static void ipc_unmap(CUdeviceptr base, uint64_t mapped, uint64_t bytes)
{
	if (mapped)
		nvs_memory_driver.mem_unmap(base, mapped);
	if (nvs_memory_driver.address_free)
		nvs_memory_driver.address_free(base, bytes);
}

/* A bit of opened.devices. 0: there are too many devices, one is asked for each time. */
static uint64_t bit_of(int dev)
{
	return dev < 64 ? 1ull << dev : 0;
}

/* Opens memory that is mapped to a device. */
static bool ipc_let_in(CUdeviceptr base, uint64_t bytes, int dev)
{
	struct cu_access access = { { CU_MEM_LOCATION_TYPE_DEVICE, dev }, CU_MEM_ACCESS_READWRITE };

	return nvs_memory_driver.set_access(base, bytes, &access, 1) == CUDA_SUCCESS;
}

/* Memory that is open is opened once more, on this device. */
static int open_again(struct opened *o, int dev, CUdeviceptr *base)
{
	if (!(o->devices & bit_of(dev)) && !ipc_let_in(o->base, o->bytes, dev))
		return CUDA_ERROR_INVALID_VALUE;
	o->devices |= bit_of(dev);
	o->references++;
	*base = o->base;
	return CUDA_SUCCESS;
}

/* For the current device. The lock is held. */
static int open_region(const struct ticket *t, CUdeviceptr *base)
{
	struct opened *o = NULL;
	uint64_t mapped = 0;
	int dev;

	if (nvs_driver.ctx_get_device(&dev) != CUDA_SUCCESS)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned i = 0; i < MAX_OPENED; i++) {
		if (opened[i].base && opened[i].name == t->name && opened[i].region == t->region && opened[i].pinned == t->pinned)
			return open_again(&opened[i], dev, base);
		if (!opened[i].base && !o)
			o = &opened[i];
	}
	if (!o || !t->region_bytes || t->region_bytes % GRANULE)
		return CUDA_ERROR_INVALID_VALUE;
	if (nvs_memory_driver.address_reserve(base, t->region_bytes, GRANULE, 0, 0) != CUDA_SUCCESS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!fetch(t, *base, &mapped) || !ipc_let_in(*base, mapped, dev)) {
		ipc_unmap(*base, mapped, t->region_bytes);
		return CUDA_ERROR_INVALID_VALUE;
	}
	*o = (struct opened){ t->name, t->region, t->pinned, *base, t->region_bytes, 1, bit_of(dev),
			       nvs_current_context() };
	atomic_fetch_add(&opened_used, 1);
	return CUDA_SUCCESS;
}

int nvs_ipc_open(CUdeviceptr *p, const struct cu_ipc_handle *handle)
{
	struct nvs_signals q;
	struct ticket t;
	CUdeviceptr base = 0;
	int result;

	memcpy(&t, handle, sizeof(t));
	if (!p || t.magic != IPC_MAGIC || t.offset >= t.region_bytes)
		return -1;
	nvs_signals_block(&q);
	nvs_lock(&lock);
	result = open_region(&t, &base);
	nvs_unlock(&lock);
	nvs_signals_restore(&q);
	if (result == CUDA_SUCCESS)
		*p = base + t.offset;
	return result;
}

int nvs_ipc_close(CUdeviceptr p)
{
	struct nvs_signals q;
	struct opened gone = { 0 };
	bool ours = false;

	if (!atomic_load(&opened_used))
		return -1;
	nvs_signals_block(&q);
	nvs_lock(&lock);
	for (unsigned i = 0; i < MAX_OPENED && !ours; i++) {
		struct opened *o = &opened[i];

		ours = o->base && p - o->base < o->bytes;
		if (ours && --o->references == 0) {
			gone = *o;
			o->base = 0;
			atomic_fetch_sub(&opened_used, 1);
		}
	}
	nvs_unlock(&lock);
	nvs_signals_restore(&q);
	if (!ours)
		return -1;
	if (gone.base) {
		/* The driver waits as well: no work uses the memory any more. */
		if (nvs_driver.ctx_synchronize)
			nvs_driver.ctx_synchronize();
		ipc_unmap(gone.base, gone.bytes, gone.bytes);
	}
	return CUDA_SUCCESS;
}

void *nvs_ipc_context(CUdeviceptr p)
{
	struct nvs_signals q;
	void *ctx = NULL;

	if (!atomic_load(&opened_used))
		return NULL;
	nvs_signals_block(&q);
	nvs_lock(&lock);
	for (unsigned i = 0; i < MAX_OPENED && !ctx; i++)
		if (opened[i].base && p - opened[i].base < opened[i].bytes)
			ctx = opened[i].ctx;
	nvs_unlock(&lock);
	nvs_signals_restore(&q);
	return ctx;
}

void nvs_ipc_fork_child(void)
{
	static const struct nvs_lock fresh = NVS_LOCK(NVS_RANK_IPC);

	lock = fresh;
	nvs_descriptor_close(&listener);
	own_name = own_secret = 0;
	memset(opened, 0, sizeof(opened));
	atomic_store(&opened_used, 0);
}
