// SPDX-License-Identifier: Apache-2.0
/*
 * fuzz_frame.c: the client fed with any packets, through its socket, and with
 * any grant page; beside them threads come to the gate and leave it, and drains
 * end. Built with the shim's sources; client.c is in here for its statics.
 *
 * Input: one byte what happens; a packet is followed by its 64 bytes (fewer at
 * the end of the input), a word of the page by 5.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "../core/client.c"

#define MUST(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); \
			abort(); \
		} \
	} while (0)

enum { GPUS = 2 };

static struct nvs_page *page;
static int page_fd, short_fd, scheduler = -1;
static unsigned waiting[GPUS];

static unsigned descriptors(void)
{
	DIR *d = opendir("/proc/self/fd");
	unsigned n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static void setup(void)
{
	page_fd = memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	short_fd = memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	MUST(ftruncate(page_fd, NVS_PAGE_SIZE) == 0 && ftruncate(short_fd, 100) == 0);
	MUST(fcntl(page_fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
	MUST(fcntl(short_fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
	page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
	MUST(page != MAP_FAILED);
}

static void connected(void)
{
	int pair[2];

	if (scheduler >= 0)
		close(scheduler);
	if (nvs_client.socket.fd >= 0)
		disconnect("again");
	MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
	scheduler = pair[0];
	nvs_client.socket = nvs_descriptor_of(pair[1]);
}

/* What the client says must be frames of its side. */
static void listen_to_client(void)
{
	struct nvs_frame f;
	ssize_t n;

	while ((n = recv(scheduler, &f, sizeof(f), 0)) > 0) {
		MUST(n == sizeof(f) && f.version == NVS_WIRE_VERSION && f.channel < GPUS);
		MUST((f.type >= NVS_REGISTER && f.type <= NVS_RESERVE) || f.type == NVS_SUSPENDED);
		if (f.type == NVS_RELEASE)
			MUST(valid_epoch(f.epoch));
		if (f.type == NVS_ATTACH && f.epoch)
			MUST(valid_epoch(f.epoch));
	}
}

static void packet(const uint8_t *data, size_t size, unsigned how)
{
	union { struct cmsghdr align; char buf[CMSG_SPACE(2 * sizeof(int))]; } control;
	struct iovec iov = { (void *)(uintptr_t)data, size };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	unsigned fds = how % 4 == 3 ? 2 : how % 4 ? 1 : 0;
	int fd = how % 4 == 2 ? short_fd : page_fd;

	memset(&control, 0, sizeof(control));
	if (fds) {
		m.msg_control = &control;
		m.msg_controllen = CMSG_SPACE(fds * sizeof(int));
		CMSG_FIRSTHDR(&m)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&m)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&m)->cmsg_len = CMSG_LEN(fds * sizeof(int));
		for (unsigned i = 0; i < fds; i++)
			memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)) + i * sizeof(int), &fd, sizeof(int));
	}
	if (nvs_client.socket.fd < 0)
		connected();
	if (sendmsg(scheduler, &m, MSG_NOSIGNAL) > 0)
		client_receive();
}

static void check(void)
{
	for (unsigned i = 0; i < GPUS; i++) {
		struct nvs_gpu *gpu = &nvs_gpus[i];
		const struct lease *l = &gpu->lease;
		bool passes = nvs_gate_is_open(gpu);

		/* Whatever the page says: a lease opens the gate, or that there is none. */
		MUST(!passes || l->gate == LEASE_OPEN || l->gate == LEASE_FREE);
		MUST(l->gate != LEASE_FREE || (passes && l->link != LEASE_ATTACHED));
		MUST(l->gate != LEASE_OPEN ||
		     atomic_load(&gpu->epoch) == (uint32_t)l->epoch);
		MUST(gpu->drains.due == (l->gate == LEASE_DRAINING));
		MUST(l->waiting == waiting[i]);
		MUST(gpu->grace_ns <= GRACE_MAX_NS);
	}
	MUST((nvs_client.link == LINK_UP) <= (nvs_client.socket.fd >= 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct nvs_device devices[GPUS] = {
		{ .dev = 0, .total_mem = 1 << 30 },
		{ .dev = 1, .uuid = { 1 }, .total_mem = 1 << 30 },
	};
	static struct nvs_budget *budgets[GPUS];
	static struct nvs_swap *swaps[GPUS];
	static unsigned runs, open_fds;

	if (!runs)
		setup();
	if (runs++ % 4096 == 1) { /* nothing piles up */
		MUST(!open_fds || descriptors() < open_fds + 16);
		open_fds = open_fds ? open_fds : descriptors();
	}
	/* A process like new, as after a fork, without its thread. */
	nvs_client_fork_child();
	memset(waiting, 0, sizeof(waiting));
	memset(page, 0, NVS_PAGE_SIZE);
	page->magic = NVS_PAGE_MAGIC;
	page->version = NVS_WIRE_VERSION;
	page->slots = NVS_MAX_CHANNELS;
	nvs_gpus_start(devices, GPUS);
	if (runs == 1)
		nvs_memory_ops.start();
	for (unsigned i = 0; i < GPUS; i++) {
		page->slot[i].limit_seq = 2;
		/* What is known of memory stays, and so do its threads. */
		budgets[i] = nvs_gpus[i].budget = runs == 1 ? nvs_gpus[i].budget : budgets[i];
		swaps[i] = nvs_gpus[i].swap = runs == 1 ? nvs_gpus[i].swap : swaps[i];
	}
	nvs_client.link = LINK_STARTING;
	nvs_client.backoff_ns = RETRY_MIN_NS;
	nvs_lock(&nvs_client_lock);
	connected();
	while (size) {
		struct lease_event ev = { 0 };
		unsigned op = *data++, i = op >> 4 & 1;
		size_t n;

		size--;
		switch (op % 8) {
		case 0: /* a thread comes to the gate; nvs_gate_wait without the waiting */
			nvs_gpu_step(&nvs_gpus[i], (struct lease_event){ .type = LEASE_EV_USE });
			nvs_gpu_step(&nvs_gpus[i], (struct lease_event){ .type = LEASE_EV_WANT });
			nvs_gpu_step(&nvs_gpus[i], (struct lease_event){ .type = LEASE_EV_WORD,
								  .word = nvs_gpu_word(&nvs_gpus[i]) });
			waiting[i]++;
			break;
		case 1:
			if (waiting[i]) {
				nvs_gpu_step(&nvs_gpus[i], (struct lease_event){ .type = LEASE_EV_LEAVE });
				waiting[i]--;
			}
			break;
		case 2: /* the drains end */
			ev.type = LEASE_EV_DRAINED;
			for (unsigned j = 0; j < GPUS; j++)
				if (nvs_gpus[j].drains.due) {
					nvs_gpus[j].drains.due = false;
					nvs_gpu_step(&nvs_gpus[j], ev);
				}
			break;
		case 3: /* the page changes, any part of it */
			if (size >= 5) {
				uint32_t at = data[0] % 32;

				memcpy((char *)&page->slot[i] + (at & ~3u), data + 1, 4);
				if (page->slot[i].word == NVS_WORD_NONE) /* wire.h: no page ever */
					page->slot[i].word = NVS_WORD_CLOSED;
				data += 5;
				size -= 5;
			}
			break;
		case 4:
			nvs_stats_send(nvs_now() + NVS_S);
			early_release(nvs_now());
			ev.type = op & 0x20 ? LEASE_EV_NUDGE : LEASE_EV_IDLE;
			nvs_gpu_step(&nvs_gpus[i], ev);
			break;
		default:
			n = size < NVS_FRAME_SIZE ? size : NVS_FRAME_SIZE;
			if (op == 0xff) {
				connected();
				break;
			}
			if (n)
				packet(data, n, op >> 5);
			data += n;
			size -= n;
		}
		listen_to_client();
		check();
	}
	if (nvs_client.socket.fd >= 0)
		disconnect("end of the run");
	nvs_unlock(&nvs_client_lock);
	close(scheduler);
	scheduler = -1;
	return 0;
}
