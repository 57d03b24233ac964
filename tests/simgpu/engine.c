// SPDX-License-Identifier: Apache-2.0
/*
 * engine.c: how processes share the compute engine of a GPU, and the clock that
 * each has for that; when work begins and ends. See shared.h.
 */
#include "shared_state.h"

#define LOOK_NS 500000ull /* between two looks at a clock that stands still */

static int in_gap(const struct sim_slot_gpu *s)
{
	return s->v >= s->gap_from && s->v < s->gap_to;
}

/* Whether two slots are one for the engine: the same, or of one MPS group. */
static int one(int a, int b)
{
	return a == b || (a >= 0 && b >= 0 && sim_st->slot[a].group && sim_st->slot[a].group == sim_st->slot[b].group);
}

/* Whether channels of a process are off, or of another in its group. */
static int is_off(const struct sim_slot *s, int gpu)
{
	if (s->gpu[gpu].off || !s->group)
		return s->gpu[gpu].off != 0;
	for (uint32_t i = 0; i < sim_st->high; i++)
		if (sim_st->slot[i].used && sim_st->slot[i].group == s->group && sim_st->slot[i].gpu[gpu].off)
			return 1;
	return 0;
}

/* Whether a process wants the engine now. */
static int wants(const struct sim_slot *s, int gpu)
{
	return s->used && sim_has_work(&s->gpu[gpu]) && !is_off(s, gpu) && !in_gap(&s->gpu[gpu]);
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
		struct sim_record *r = &sim_lg->record[(last - 1) % sim_lg->capacity];

		if (!last || sim_lg->next - (last - 1) >= sim_lg->capacity || r->slot != s - sim_st->slot ||
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
	uint64_t ns = sim_st->slot[slot].gpu[gpu].slice;

	return ns ? ns : SIM_SLICE_NS;
}

/* Who is served: who was, while it wants and its slice lasts, else the next in the round; -1 nobody. */
static int serve(struct sim_gpu *g, int gpu, int *others)
{
	int n = (int)sim_st->high, next = -1, mate = -1, last = g->serves;

	*others = 0;
	if (last >= n || (last >= 0 && sim_st->slot[last].generation != g->generation))
		last = g->serves = -1;
	for (int k = 1; k <= n; k++) {
		int i = (last + k) % n;

		if (!wants(&sim_st->slot[i], gpu) || i == last)
			continue;
		if (one(i, last)) {
			mate = i;
			continue;
		}
		if (next < 0)
			next = i;
		++*others;
	}
	if (mate >= 0 && !wants(&sim_st->slot[last], gpu)) { /* its group goes on */
		last = g->serves = mate;
		g->generation = sim_st->slot[mate].generation;
	}
	if (last >= 0 && wants(&sim_st->slot[last], gpu) && (g->slice_left || next < 0)) {
		if (!g->slice_left)
			g->slice_left = slice_of(last, gpu);
		return last;
	}
	if (next < 0)
		return -1;
	*others -= 1;
	g->switch_left = last >= 0 ? SIM_SWITCH_NS : 0;
	g->serves = next;
	g->generation = sim_st->slot[next].generation;
	g->slice_left = slice_of(next, gpu);
	*others += last >= 0 && wants(&sim_st->slot[last], gpu);
	return next;
}

void sim_advance(int gpu, uint64_t now)
{
	struct sim_gpu *g = &sim_st->gpu[gpu];

	while (g->at < now) {
		uint64_t step = now - g->at;
		int others, served = serve(g, gpu, &others), idle = served < 0;

		for (uint32_t i = 0; i < sim_st->high; i++) { /* not beyond where a gap ends */
			const struct sim_slot_gpu *s = &sim_st->slot[i].gpu[gpu];

			if (sim_st->slot[i].used && sim_has_work(s) && !s->off && in_gap(s)) {
				idle = 0;
				if (s->gap_to - s->v < step)
					step = s->gap_to - s->v;
			}
		}
		if (served >= 0 && g->switch_left) {
			if (g->switch_left < step)
				step = g->switch_left;
		} else if (served >= 0) {
			for (int i = 0; i < (int)sim_st->high; i++) {
				const struct sim_slot_gpu *s = &sim_st->slot[i].gpu[gpu];
				uint64_t end = s->v < s->gap_from && s->gap_from < s->gap_to ? s->gap_from : s->tail[SIM_COMPUTE];

				if (one(i, served) && wants(&sim_st->slot[i], gpu) && end - s->v < step)
					step = end - s->v;
			}
			if (others && g->slice_left < step)
				step = g->slice_left;
		}
		for (uint32_t i = 0; !idle && i < sim_st->high; i++) {
			struct sim_slot_gpu *s = &sim_st->slot[i].gpu[gpu];

			if (!sim_st->slot[i].used || !sim_has_work(s))
				continue;
			if ((!s->off && in_gap(s)) || (one((int)i, served) && wants(&sim_st->slot[i], gpu) && !g->switch_left)) {
				goes(s, g->at);
				s->ran += in_gap(s) ? 0 : step;
				s->v += step;
			} else {
				stood_still(&sim_st->slot[i], gpu, g->at, step);
			}
		}
		if (idle) /* those whose channels are off */
			for (uint32_t i = 0; i < sim_st->high; i++)
				if (sim_st->slot[i].used && sim_has_work(&sim_st->slot[i].gpu[gpu]))
					stood_still(&sim_st->slot[i], gpu, g->at, step);
		if (served >= 0 && g->switch_left)
			g->switch_left -= step;
		else if (served >= 0) /* who is alone begins one slice after the other */
			g->slice_left = g->slice_left > step
						? g->slice_left - step
						: others ? 0 : slice_of(served, gpu) - (step - g->slice_left) % slice_of(served, gpu);
		g->at += step;
	}
}

/* What this process has on the GPU that it knows by an index. */
static struct sim_slot_gpu *own(int gpu)
{
	return &sim_st->slot[sim_self].gpu[sim_at(gpu)];
}

/* Locked: this process's clock, brought up to now. */
static uint64_t own_clock(int gpu, uint64_t now)
{
	struct sim_slot_gpu *s = own(gpu);

	sim_advance(sim_at(gpu), now);
	return sim_has_work(s) ? s->v : now;
}

uint64_t sim_clock(int clock)
{
	uint64_t now, v;

	if (!clock)
		return sim_now();
	sim_lock();
	now = sim_now();
	v = sim_self < 0 ? UINT64_MAX : own_clock(clock - 1, now);
	sim_unlock();
	return v;
}

uint64_t sim_day(struct sim_time t, int end)
{
	uint64_t day = t.ns;

	if (!t.clock)
		return day;
	sim_lock();
	if (sim_self >= 0) {
		const struct sim_slot_gpu *s = own(t.clock - 1);

		for (uint32_t k = 0; k < SIM_SEGMENTS && k < s->segments; k++) {
			const struct sim_segment *g = &s->segment[(s->segments - 1 - k) % SIM_SEGMENTS];

			day = g->t + (t.ns - g->v);
			if (g->v < t.ns || (g->v == t.ns && !end))
				break;
		}
	}
	sim_unlock();
	return day;
}

uint64_t sim_still(struct sim_time from, uint64_t to, uint64_t *began)
{
	uint64_t longest = 0;

	*began = 0;
	sim_lock();
	if (sim_self >= 0 && from.clock) {
		const struct sim_slot_gpu *s = own(from.clock - 1);

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
	sim_unlock();
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
	sim_lock();
	now = sim_now();
	v = sim_self < 0 ? UINT64_MAX : own_clock(b.clock - 1, now);
	sim_unlock();
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
	sim_lock();
	now = soonest = sim_now();
	if (sim_self >= 0) {
		int others, gpu = t.clock - 1;

		v = own_clock(gpu, now);
		if (t.ns > v) {
			soonest = now + (t.ns - v);
			if (own(gpu)->off || !one(serve(&sim_st->gpu[sim_at(gpu)], sim_at(gpu), &others), sim_self))
				soonest = soonest > now + LOOK_NS ? soonest : now + LOOK_NS;
		}
	}
	sim_unlock();
	return soonest;
}

void sim_set_off(int gpu, int off)
{
	sim_lock();
	if (sim_self >= 0) {
		struct sim_slot_gpu *s = own(gpu);
		uint64_t now = sim_now();

		gpu = sim_at(gpu);
		if (s->off && !off && sim_bury_pending(gpu, now))
			now = sim_now(); /* after the deaths in the log, as new work is */
		sim_advance(gpu, now);
		if (s->off && !off) {
			__atomic_store_n(&s->times_on, s->times_on + 1, __ATOMIC_RELEASE);
			sim_record_on(gpu, now, sim_has_work(s) ? s->tail[SIM_COMPUTE] - s->v : 0);
		} else if (!s->off && off) {
			sim_record_off(gpu, now);
		}
		__atomic_store_n(&s->off, (uint32_t)off, __ATOMIC_RELEASE);
	}
	sim_unlock();
}

int sim_is_off(int gpu, uint32_t *times_on)
{
	int off = 0;

	*times_on = 0;
	if (sim_self >= 0) {
		off = (int)__atomic_load_n(&own(gpu)->off, __ATOMIC_ACQUIRE);
		*times_on = __atomic_load_n(&own(gpu)->times_on, __ATOMIC_ACQUIRE);
	}
	return off;
}

void sim_set_slice(int gpu, uint64_t ns)
{
	sim_lock();
	if (sim_self >= 0) {
		gpu = sim_at(gpu);
		sim_advance(gpu, sim_now());
		sim_st->slot[sim_self].gpu[gpu].slice = ns;
		if (sim_st->gpu[gpu].serves == sim_self)
			sim_st->gpu[gpu].slice_left = ns ? ns : SIM_SLICE_NS;
	}
	sim_unlock();
}

/* ---- submission ---- */

/* Compute work, by the clock of the process. */
static uint64_t submit_compute(int gpu, int kind, uint64_t now, struct sim_time after, uint64_t ns, uint64_t *start)
{
	struct sim_slot_gpu *s = own(gpu);
	uint64_t v = own_clock(gpu, now), begin = v, busy;

	if (!sim_has_work(s)) { /* the clock shows the day again */
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
	sim_record_work(sim_at(gpu), kind, now, now + (begin - v), now + (begin + ns - v));
	*start = begin;
	return begin + ns;
}

struct sim_time sim_submit(int gpu, int engine, int kind, struct sim_time after, uint64_t ns, uint64_t *start)
{
	uint64_t now, v, begin, ahead = 0;
	struct sim_time end = { 0, 0 };
	int here; /* the GPU of the node */

	sim_lock_running();
	here = sim_at(gpu);
	if (sim_self < 0) { /* the process is past exit(): nothing runs any more */
		sim_unlock();
		*start = after.ns;
		return after;
	}
	now = sim_now();
	if (now - sim_st->swept > SIM_SWEEP_NS) {
		sim_st->swept = now;
		sim_bury_dead();
		now = sim_now(); /* after the deaths in the log */
	} else if (sim_bury_pending(here, now)) {
		now = sim_now();
	}
	if (engine == SIM_COMPUTE) {
		end = (struct sim_time){ submit_compute(gpu, kind, now, after, ns, start), 1 + gpu };
		sim_unlock();
		return end;
	}
	for (uint32_t i = 0; i < sim_st->high; i++)
		if (sim_st->slot[i].used && sim_st->slot[i].gpu[here].tail[engine] > now + ahead)
			ahead = sim_st->slot[i].gpu[here].tail[engine] - now;
	v = after.clock ? own_clock(after.clock - 1, now) : now;
	begin = v + ahead > after.ns ? v + ahead : after.ns;
	if (after.clock && begin == v + ahead && after.ns <= v) {
		after.clock = 0; /* what it waits for is over: it goes by the day */
		begin = now + ahead;
		v = now;
	}
	own(gpu)->tail[engine] = now + (begin - v) + ns;
	sim_record_work(here, kind, now, now + (begin - v), now + (begin - v) + ns);
	sim_unlock();
	*start = begin;
	end = (struct sim_time){ begin + ns, after.clock };
	return end;
}
