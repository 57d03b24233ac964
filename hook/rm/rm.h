// SPDX-License-Identifier: Apache-2.0
/*
 * rm.h: the GPU's own scheduler, as an ordinary process may use it: the time slice of its channel
 * groups, and its channels off the GPU and on again in the middle of a kernel. README.md says how,
 * and what may not happen meanwhile. A GPU is named by its UUID. No control is sent to the driver
 * before one of these functions is called.
 */
#ifndef NVSHARE_RM_H
#define NVSHARE_RM_H

#include <stdbool.h>
#include <stdint.h>

#define NVS_RM_UUID 16

enum nvs_rm_result {
	NVS_RM_OK,
	NVS_RM_UNTRIED,
	NVS_RM_UNSEEN,  /* no compute group, or no subdevice, of this GPU was seen */
	NVS_RM_REFUSED, /* the driver answered with an error: nvs_rm_state.status */
	NVS_RM_FAKED,   /* the driver answered success and changed nothing */
	NVS_RM_LOST,    /* the driver's descriptor is closed, or something else now */
	NVS_RM_BUSY,    /* channels are kept on, or another thread's control did not end in time */
};

/* Words for logs and reports. */
const char *nvs_rm_text(enum nvs_rm_result r);

typedef int nvs_rm_ioctl(int fd, unsigned long request, ...);

/* Our ioctl leads there from now on: to a driver's own. */
void nvs_rm_set_next(nvs_rm_ioctl *next);

/* Of the layer above, if there is one: the ioctl that comes after ours. NULL: the kernel's own. */
nvs_rm_ioctl *nvs_rm_find_next(void) __attribute__((weak));

/*
 * Sets the time slice of all compute groups on a GPU, and of later ones, and reads each back. us:
 * microseconds; the driver refuses or rounds by limits of its own. 0 leaves later groups as they
 * come.
 */
enum nvs_rm_result nvs_rm_slice(const uint8_t uuid[NVS_RM_UUID], uint64_t us);

/* The time slice of the first compute group of a GPU. */
enum nvs_rm_result nvs_rm_get_slice(const uint8_t uuid[NVS_RM_UUID], uint64_t *us);

/*
 * Takes the channels of all compute groups of a GPU off, or puts them on. Once they are off, no
 * kernel of this process runs there; what ran goes on, in its middle, when they are on again. Copy
 * engines go on. If one channel can't be taken off, all are put on again; those that the driver
 * refuses to put on stay off, and are tried again by nvs_rm_state, nvs_rm_keep_on and the end of the
 * process. Takes 0.3 to 0.8 ms on an H200. No lock is held that a thread in the driver takes.
 */
enum nvs_rm_result nvs_rm_channels(const uint8_t uuid[NVS_RM_UUID], bool on);

/*
 * For a thread that waits for a GPU: puts its channels on, for 5 seconds if the driver refuses, and
 * keeps them on until the last keeper lets go; nvs_rm_channels answers NVS_RM_BUSY meanwhile.
 */
void nvs_rm_keep_on(const uint8_t uuid[NVS_RM_UUID]);
void nvs_rm_let_go(const uint8_t uuid[NVS_RM_UUID]);

/* Reads the time slice, sets another one, reads that back, and restores the first. */
enum nvs_rm_result nvs_rm_prove(const uint8_t uuid[NVS_RM_UUID]);

/*
 * Takes the channels of a GPU off and puts them on at once. NVS_RM_BUSY: they are off already, or
 * kept on. A driver that answers success and changes nothing is not found out.
 */
enum nvs_rm_result nvs_rm_prove_channels(const uint8_t uuid[NVS_RM_UUID]);

/* Work went on with the channels off: nvs_rm_channels answers NVS_RM_FAKED and takes nothing off. */
void nvs_rm_has_no_effect(const uint8_t uuid[NVS_RM_UUID]);

/* The process's objects are on other GPUs now: the RM is asked again which. For any thread. */
void nvs_rm_moved(void);

struct nvs_rm_state {
	unsigned compute_groups, other_groups;
	unsigned channels;       /* in compute groups */
	unsigned other_channels; /* in other groups */
	unsigned bare_channels;  /* in no group that was seen, on any GPU */
	bool off;                /* channels are off */
	unsigned keepers;
	uint64_t slice_us;       /* as read back; 0: never read */
	enum nvs_rm_result slice, off_on; /* how the last of each went */
	uint32_t status;         /* the driver's answer to the last control that was refused */
	bool overflow;           /* there are more objects than there is room for: what is counted is too little */
	char driver[64];         /* version, "" unknown */
};

/*
 * What is known of a GPU. Channels that the driver refused to put on are tried again first. False:
 * nothing of it was seen; then only bare_channels, overflow and driver are set.
 */
bool nvs_rm_state(const uint8_t uuid[NVS_RM_UUID], struct nvs_rm_state *state);

#endif
