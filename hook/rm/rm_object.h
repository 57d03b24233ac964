// SPDX-License-Identifier: Apache-2.0
/*
 * rm_object.h: what the files of this layer share: the objects of the RM that this process has
 * (devices, subdevices, channel groups, channels). Functions for any thread, which do not call the
 * driver. The lock of the table is the innermost of the shim: nothing is waited for under it, and no
 * signal handler runs then.
 */
#ifndef NVSHARE_RM_OBJECT_H
#define NVSHARE_RM_OBJECT_H

#include <stdbool.h>
#include <stdint.h>

#include "descriptor.h"
#include "rm.h"

#define NVS_RM_MAX_GPUS    32
#define NVS_RM_MAX_TARGETS 2048 /* channels, or groups, of one GPU */

/* What a control is sent to. */
struct rm_target {
	struct nvs_descriptor via; /* that the object was made through */
	uint32_t client, subdevice, object;
};

struct rm_gpu {
	uint8_t uuid[NVS_RM_UUID];
	bool used;
	bool off;
	bool wanted_off; /* until somebody wants them on for good: a keeper needs them on only for a time */
	bool stuck;     /* off, and the driver refused to put them on */
	bool no_effect; /* channels that are off go on: see nvs_rm_has_no_effect */
	unsigned keepers;
	uint64_t wanted_us, slice_us;
	enum nvs_rm_result slice, off_on;
	uint32_t status;
};

enum rm_kind { RM_KIND_GROUPS, RM_KIND_CHANNELS_ON, RM_KIND_CHANNELS_OFF };

/* Grows with each object that comes or goes. */
uint64_t rm_serial(void);

/* True if it is a compute group: it has the driver's own time slice. */
bool rm_note_alloc(int fd, uint32_t client, uint32_t parent, uint32_t object, uint32_t class, uint32_t engine);
/* Forgets an object that was there at `serial`, and all below it. client == object: all of the client. */
void rm_note_free(uint32_t client, uint32_t object, uint64_t serial);
void rm_note_version(const char text[64]);

/* A subdevice whose GPU is not known yet; false: there is none. */
bool rm_unnamed_subdevice(struct rm_target *t);
/* Which GPU it is. NULL: the RM does not say, which is not asked again. */
void rm_name_subdevice(const struct rm_target *t, const uint8_t *uuid);

/* The compute groups of a GPU, or those of their channels that are on, or off; at most NVS_RM_MAX_TARGETS. */
unsigned rm_targets(const uint8_t uuid[NVS_RM_UUID], enum rm_kind kind, struct rm_target *t);
/* These channels were taken off, or put on. */
void rm_note_off(const struct rm_target *channels, unsigned n, bool off);

/* Calls fn with the GPU's record, which it may change; a new one if there is none. false: no room. */
bool rm_with_gpu(const uint8_t uuid[NVS_RM_UUID], void (*fn)(struct rm_gpu *, void *), void *arg);
/* The record at a place below NVS_RM_MAX_GPUS. False: none is there. */
bool rm_gpu_at(unsigned i, struct rm_gpu *g);
/* A GPU that has channels off among an object and those below it. client == object: all of the client. */
bool rm_off_below(uint32_t client, uint32_t object, uint8_t uuid[NVS_RM_UUID]);
bool rm_any_off(void); /* without the lock */

void rm_count(const uint8_t uuid[NVS_RM_UUID], struct nvs_rm_state *state);

/* ---- rm_call.c: requests to the ioctl that comes after ours ---- */

/* As ioctl(2). */
int rm_next(int fd, unsigned long request, void *arg);

/* Sends a control to an object. NVS_RM_REFUSED: *status is the driver's answer. */
enum nvs_rm_result rm_control(const struct rm_target *t, uint32_t object, uint32_t command, void *params,
			      uint32_t size, uint32_t *status);

/* ---- rm_control.c: what the exported ioctl asks of it ---- */

/* A compute group was made: where a time slice is wanted it gets that. Waits 5 s at most. */
void rm_slice_new_group(void);

/*
 * An object is about to be freed with all below it, which may wait for the GPU: channels of GPUs
 * that have some there go on first. Waits 5 s at most for each.
 */
void rm_put_on_below(uint32_t client, uint32_t object);

/* The same of all channels. */
void rm_put_all_on(void);

#endif
