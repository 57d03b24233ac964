// SPDX-License-Identifier: Apache-2.0
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"

uint64_t test_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void address(struct fake *f, struct sockaddr_un *a)
{
	memset(a, 0, sizeof(*a));
	a->sun_family = AF_UNIX;
	snprintf(a->sun_path, sizeof(a->sun_path), "%s/%s", f->dir, NVS_SOCKET_NAME);
}

void fake_init(struct fake *f)
{
	memset(f, 0, sizeof(*f));
	test_dir(f->dir);
	CHECK(setenv(NVS_RUN_DIR_ENV, f->dir, 1) == 0);
	CHECK(setenv("NVSHARE_GPU", "0", 1) == 0); /* as an engine does: else the program asks on which GPU it is */
	f->listener = f->conn = f->page_fd = -1;
}

void fake_listen(struct fake *f)
{
	struct sockaddr_un a;

	address(f, &a);
	unlink(a.sun_path);
	f->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(f->listener >= 0);
	CHECK(bind(f->listener, (struct sockaddr *)&a, sizeof(a)) == 0);
	CHECK(listen(f->listener, 4) == 0);
}

static bool readable(int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int n;

	while ((n = poll(&p, 1, ms)) < 0 && errno == EINTR)
		;
	return n > 0;
}

bool fake_send_fds(struct fake *f, struct nvs_frame w, unsigned count)
{
	union { struct cmsghdr align; char buf[CMSG_SPACE(8 * sizeof(int))]; } control;
	struct iovec iov = { &w, sizeof(w) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			    .msg_controllen = CMSG_SPACE(count * sizeof(int)) };
	struct cmsghdr *c;

	memset(&control, 0, sizeof(control));
	c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(count * sizeof(int));
	for (unsigned i = 0; i < count; i++)
		memcpy(CMSG_DATA(c) + i * sizeof(int), &f->page_fd, sizeof(int));
	return sendmsg(f->conn, &m, MSG_NOSIGNAL) == sizeof(w);
}

static void send_page(struct fake *f)
{
	struct nvs_frame w = { .version = NVS_WIRE_VERSION, .type = NVS_WELCOME };

	w.u.welcome.client_id = 7;
	w.u.welcome.page_size = NVS_PAGE_SIZE;
	w.u.welcome.slots = NVS_MAX_CHANNELS;
	CHECK(fake_send_fds(f, w, 1));
}

struct nvs_frame fake_accept(struct fake *f)
{
	struct nvs_frame r;

	CHECK(readable(f->listener, PATIENCE_MS));
	f->conn = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
	CHECK(f->conn >= 0);
	r = fake_expect(f, NVS_REGISTER);
	f->page_fd = memfd_create("grant-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(f->page_fd >= 0 && ftruncate(f->page_fd, NVS_PAGE_SIZE) == 0);
	CHECK(f->unsealed || fcntl(f->page_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
	f->page = mmap(NULL, NVS_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, f->page_fd, 0);
	CHECK(f->page != MAP_FAILED);
	f->page->magic = NVS_PAGE_MAGIC;
	f->page->version = NVS_WIRE_VERSION;
	f->page->slots = NVS_MAX_CHANNELS;
	for (int i = 0; i < NVS_MAX_CHANNELS && !f->old; i++)
		f->page->slot[i].limit_seq = 2;
	send_page(f);
	return r;
}

static void grant_memory(struct fake *f, const struct nvs_frame *asked)
{
	struct nvs_frame r = { .version = NVS_WIRE_VERSION, .type = NVS_RESERVED,
			       .channel = asked->channel };

	r.u.memory.total = r.u.memory.used = asked->u.reserve.total;
	r.u.memory.serial = asked->u.reserve.serial;
	send(f->conn, &r, sizeof(r), MSG_NOSIGNAL);
}

bool fake_receive(struct fake *f, struct nvs_frame *frame, int ms)
{
	uint64_t end = test_now() + (uint64_t)ms * 1000000u;

	for (;;) {
		uint64_t now = test_now();

		if (!readable(f->conn, now < end ? (int)((end - now) / 1000000u) : 0))
			return false;
		CHECK(recv(f->conn, frame, sizeof(*frame), 0) == sizeof(*frame));
		CHECK(frame->version == NVS_WIRE_VERSION);
		if (frame->type == NVS_RESERVE && f->memory)
			grant_memory(f, frame);
		else if (frame->type != NVS_STATS)
			return true;
	}
}

struct nvs_frame fake_expect(struct fake *f, uint8_t type)
{
	struct nvs_frame frame;

	CHECK(fake_receive(f, &frame, PATIENCE_MS));
	if (frame.type != type)
		fprintf(stderr, "frame of type %u, expected %u\n", frame.type, type);
	CHECK(frame.type == type);
	return frame;
}

void fake_send(struct fake *f, uint8_t type, unsigned channel, uint32_t code, uint64_t epoch)
{
	struct nvs_frame frame = { .version = NVS_WIRE_VERSION, .type = type,
				   .channel = (uint16_t)channel, .code = code, .epoch = epoch };

	if (type == NVS_REVOKE)
		frame.u.revoke.grace_ns = 10000000000u;
	CHECK(send(f->conn, &frame, sizeof(frame), MSG_NOSIGNAL) == sizeof(frame));
}

struct nvs_frame fake_attach(struct fake *f)
{
	struct nvs_frame a = fake_expect(f, NVS_ATTACH);

	fake_send(f, NVS_ATTACHED, a.channel, 0, 0);
	return a;
}

void fake_word(struct fake *f, unsigned channel, uint32_t word)
{
	uint32_t *w = &f->page->slot[channel].word;

	__atomic_store_n(w, word, __ATOMIC_SEQ_CST);
	nvs_futex_wake(w, false);
}

void fake_grant(struct fake *f, unsigned channel, uint64_t epoch)
{
	fake_word(f, channel, (uint32_t)epoch);
	fake_send(f, NVS_GRANT, channel, 0, epoch);
}

void fake_revoke(struct fake *f, unsigned channel, uint64_t epoch)
{
	fake_word(f, channel, 0);
	fake_send(f, NVS_REVOKE, channel, 0, epoch);
}

void fake_die(struct fake *f)
{
	if (f->conn >= 0)
		close(f->conn);
	if (f->listener >= 0)
		close(f->listener);
	f->conn = f->listener = -1;
}

void fake_end(struct fake *f)
{
	char path[128];

	fake_die(f);
	snprintf(path, sizeof(path), "%s/%s", f->dir, NVS_SOCKET_NAME);
	unlink(path);
	rmdir(f->dir);
}
