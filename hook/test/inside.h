// SPDX-License-Identifier: Apache-2.0
/*
 * inside.h: what a test with the shim inside asks of it, in words that go with
 * cudadrv.h; core's headers have others for the driver's types.
 */
#ifndef INSIDE_H
#define INSIDE_H

#include <stdbool.h>
#include <stdint.h>

void inside_move(int dev, const void *uuid); /* the process is on this GPU now, as when it was restored there */
bool inside_cut_failed(int dev); /* a drain was to be cut, and could not be */
bool inside_unbound(int dev);    /* work is not bounded while nobody waits */
bool inside_cuts_soon(int dev); /* several drains from now on are cut soon */
bool inside_synchronises(int dev); /* a drain waits for a context */
void inside_look_again(int dev); /* for the effect of the controls, when the client thread wakes up, as if there had been no look */
bool inside_looks(int dev);      /* such a look is under way */
void inside_hold_record(int dev); /* the first event that is recorded while the channels are off waits until they are on */
bool inside_held_record(void);    /* it has */

#endif
