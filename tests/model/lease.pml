/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lease.pml: one GPU in exclusive mode, its scheduler, and N processes with the
 * shim; for the model checker Spin. model_test.go says how it is run.
 *
 * It covers what no test can try in each order: threads of a client against its own
 * client thread, words that are read while they change, frames that are lost with a
 * connection, and a scheduler that dies between any two actions. Time is left out: a
 * quantum may end at any time when a client waits, a grace period at any time of a
 * drain, and a patience never.
 *
 *   here                          in the code
 *   App: in_flight, word, own     hook/core: nvs_gate_enter, gate_try
 *   App: at the gate              hook/core: nvs_gate_wait, LEASE_EV_WORD
 *   Client                        hook/core: lease_step, one branch for each event
 *   Client: quiesced, drained     hook/core: do_drain
 *   Client: filled                hook/core: nvs_channel_filled
 *   word[], spage[]               the slot of a grant page, one page a connection
 *   Scheduler, core_*             sched: Step
 *   persist, then word, then send sched/daemon: carrying out actions, in that order
 *   Env: crash and restart        sched/daemon: a GPU's start from the state file
 *
 * Each lease step is atomic, because the client's lock protects it; a thread's reads of
 * the page are not. The checker's memory is sequentially consistent, and so are the
 * four accesses on which the gate depends (seq_cst in the code). Epochs are only
 * compared, so a fresh epoch is any that occurs nowhere, which keeps the model finite.
 * Left out: several GPUs and gangs, which tests/sim covers; concurrent mode, latency
 * tenants, and a client that runs without a scheduler (policy `open`, which promises
 * nothing).
 *
 * Promised, and checked:
 *   safe      two processes never have work on the GPU, except fenced ones
 *   no stuck  no state in which nothing can happen any more
 *   served    a client that waits at the gate gets a grant (WHO names the client)
 *
 * Each of these macros turns a part off; the checker then finds what the part prevents:
 *   NO_INFLIGHT   no in-flight flag: the gate checks and launches, as in the original
 *                 nvshare
 *   NO_PERSIST    holders are not recorded before they are granted
 *   IDLE_EARLY    an early release before the GRANT of the same epoch was read
 *   NO_CLOSED     a released epoch opens the gate again if the page still has it
 *   FINISH_EARLY  channels go on without a grant though a call is in flight
 *
 * With MOVES, clients move memory onto the GPU under their grants: a gate opens for
 * threads some time after its lease, or never. Copies are not work here: they may go on
 * beside another client's.
 *
 * PREEMPTIONS is the greatest number of drains that are cut, at any time, also while calls
 * are in flight: the channels are off, and what is submitted stays until they are on. The
 * work itself then wants a grant.
 *
 * With CHOSEN, the scheduler chooses and records the next holder while the current one
 * drains, as the code does. Without, it does so at the release, which has an eighth of
 * the states. CRASHES of the scheduler, CUTS of connections, KILLS of processes and
 * FENCES are the greatest numbers of faults.
 */
#ifndef N
#define N 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef CUTS
#define CUTS 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef PREEMPTIONS
#define PREEMPTIONS 0
#endif
#ifndef FENCES
#define FENCES 0
#endif
#define EPOCHS (4 * N + 1)
#define NOBODY N
#define CLOSED_WORD 0
#define NO_WORD     255 /* no page ever holds it */

mtype = { ATTACH, REQUEST, RELEASE, ATTACHED, GRANT, REVOKE };
mtype = { DETACHED, ATTACHING, LINKED };           /* enum lease_link */
mtype = { SHUT, OPEN, DRAINING, QUIESCED, DRAINED }; /* enum lease_gate; QUIESCED: no call in flight */

/* The GPU, as a judge sees it. */
bool work[N];
bool fenced[N];
byte preemptions;
bool off[N]; /* its channels; struct lease: unfinished */
#define beside(i, j) (i != j && work[j] && !off[j] && !fenced[j] && !fenced[i])
#if N == 2
#define beside_others(i) (beside(i, 0) || beside(i, 1))
#else
#define beside_others(i) (beside(i, 0) || beside(i, 1) || beside(i, 2))
#endif

/* A process: its memory. */
bool dead[N];
bool lock[N];       /* of the client, while a thread reads the page under it */
bool in_flight[N];
byte own[N] = NO_WORD;
mtype link[N] = DETACHED;
mtype gate[N] = SHUT;
byte held[N];       /* struct lease: epoch */
byte closed[N];
bool requested[N];
bool guessed[N];    /* opened by the word; the GRANT has not arrived */
bool waiting[N];
byte seen[N];       /* what a thread has read from the page */
byte frame_epoch[N], word_read[N]; /* what the client thread has read */

/*
 * Between process and scheduler: the word of the page that a client reads, and the word
 * of the page that a new connection brought, until the client reads that page. A page
 * outlives the scheduler that made it.
 */
#define OLD_PAGE 0
#define NEW_PAGE 1
byte words[2 * N];
#define word(i, p) words[2 * (i) + (p)]
bool conn[N];
bool ceof[N], seof[N]; /* it ended; client, scheduler have not noticed */
chan up[N]   = [3] of { mtype, byte, bool };
chan down[N] = [4] of { mtype, byte };

/* The scheduler: a file, and memory that a crash clears. */
byte p_epoch[N]; /* the epoch that a client holds, or may be granted next */
bool running = true, crash;
bit  spage[N]; /* OLD_PAGE once the client reads the page to which the scheduler writes */
byte c_epoch[N];
bool c_revoked[N], c_fenced[N], c_connected[N], c_want[N], c_gone[N];
byte queue[N], queued;
byte next_client = NOBODY, next_epoch; /* CHOSEN: the next holder is recorded while the current one drains */
byte fences;
byte turn; /* the client whose frames are read first, so that none wait for ever */

/* ---- the process ---- */

inline send_up(i, type, epoch, want) {
	if
	:: conn[i] -> up[i]!type, epoch, want
	:: else
	fi
}

inline ask(i) {
	if
	:: link[i] == LINKED && gate[i] == SHUT && !requested[i] && (waiting[i] || off[i]) ->
		requested[i] = true;
		send_up(i, REQUEST, 0, true)
	:: else
	fi
}

/* What was submitted goes on: it must be alone, as any other work. */
inline channels_on(i) {
	off[i] = false;
	assert(!work[i] || !beside_others(i))
}

inline open_gate(i, epoch, by_word) {
	gate[i] = OPEN;
	held[i] = epoch;
	requested[i] = false;
	guessed[i] = by_word;
	channels_on(i);
#ifdef MOVES
	own[i] = (own[i] == epoch -> epoch : NO_WORD)
#else
	own[i] = epoch
#endif
}

inline drain(i) {
	own[i] = NO_WORD;
	guessed[i] = false;
	gate[i] = DRAINING
}

inline release(i) {
	send_up(i, RELEASE, held[i], off[i]);
	closed[i] = held[i];
	held[i] = 0;
	gate[i] = SHUT;
	requested[i] = false;
	ask(i)
}

inline attach(i) {
	link[i] = ATTACHING;
	requested[i] = (held[i] == 0 && (waiting[i] || off[i]));
	if
	:: held[i] == 0 -> closed[i] = 0; fenced[i] = false
	:: else
	fi;
	send_up(i, ATTACH, held[i], requested[i])
}

#ifdef NO_CLOSED
#define grants(i, w) (w != CLOSED_WORD)
#else
#define grants(i, w) (w != CLOSED_WORD && w != closed[i])
#endif

/* Drained without a connection: no RELEASE is sent. */
inline forget_held(i) {
	closed[i] = held[i];
	held[i] = 0;
	gate[i] = SHUT
}

inline look_at_new(i) {
	d_step {
		if
		:: spage[i] == NEW_PAGE -> /* otherwise the connection is cut */
			word(i, OLD_PAGE) = word(i, NEW_PAGE);
			word(i, NEW_PAGE) = CLOSED_WORD;
			spage[i] = OLD_PAGE
		:: else
		fi
	}
}

inline on_attached(i, w) {
	link[i] = LINKED;
	if
	:: gate[i] == OPEN && w != held[i] -> drain(i) /* not adopted, or revoked since */
	:: else
	fi;
	look_at_new(i);
	if
	:: gate[i] == DRAINED -> release(i)
	:: gate[i] == SHUT -> ask(i)
	:: else
	fi
}

inline on_revoke(i, epoch) {
	if
	:: gate[i] == OPEN && epoch == held[i] -> drain(i)
	:: gate[i] == OPEN && epoch != held[i] /* an older epoch, which was released */
	:: gate[i] == DRAINING || gate[i] == QUIESCED -> held[i] = epoch
	:: gate[i] == SHUT -> held[i] = epoch; fenced[i] = false; release(i) /* never opened */
	:: else
	fi
}

#ifdef IDLE_EARLY
#define may_idle(i) true
#else
#define may_idle(i) (!guessed[i])
#endif

#ifdef FINISH_EARLY
#define may_finish(i) true
#else
#define may_finish(i) (!in_flight[i])
#endif

/* A thread of the application; it launches without an end. */
proctype App(byte i) {
	{
	skip;
gated:
#ifndef NO_INFLIGHT
		in_flight[i] = true;
#endif
		seen[i] = word(i, OLD_PAGE);
		if
		:: seen[i] == own[i] ->
			d_step {
				work[i] = true;
				assert(off[i] || !beside_others(i));
				seen[i] = 0;
				in_flight[i] = false
			}
			goto gated
		:: else -> d_step { seen[i] = 0; in_flight[i] = false }
		fi;
		atomic { !lock[i] -> waiting[i] = true; ask(i) }
closed_gate:
		atomic {
			!lock[i] && (word(i, OLD_PAGE) == own[i] ||
				     link[i] == LINKED && gate[i] == SHUT && grants(i, word(i, OLD_PAGE))) ->
			lock[i] = true;
			seen[i] = word(i, OLD_PAGE)
		}
		/* The scheduler may write to the page here. */
		atomic {
			if
			:: link[i] == LINKED && gate[i] == SHUT && grants(i, seen[i]) -> open_gate(i, seen[i], true)
			:: else
			fi;
			lock[i] = false;
			if
			:: seen[i] == own[i] -> waiting[i] = false; seen[i] = 0; goto gated
			:: else -> seen[i] = 0; goto closed_gate
			fi
		}
	} unless { dead[i] }
}

/* The client thread, and the drainer. */
proctype Client(byte i) {
	mtype t;
	{
	do
	:: atomic { /* LEASE_EV_UP */
		running && !conn[i] && !ceof[i] && !seof[i] && !lock[i] ->
		conn[i] = true;
		spage[i] = NEW_PAGE;
		word(i, NEW_PAGE) = CLOSED_WORD;
		attach(i)
	   }
	:: atomic { /* LEASE_EV_DOWN; unread frames are lost */
		ceof[i] && !lock[i] ->
		ceof[i] = false;
		do
		:: down[i]?_, _
		:: len(down[i]) == 0 -> break
		od;
		word(i, NEW_PAGE) = CLOSED_WORD;
		spage[i] = (seof[i] -> spage[i] : NEW_PAGE);
		requested[i] = false;
		link[i] = DETACHED;
		if
		:: gate[i] == DRAINED -> forget_held(i)
		:: else
		fi
	   }
	:: atomic { /* a frame */
		len(down[i]) > 0 && !lock[i] ->
		lock[i] = true;
		down[i]?t, frame_epoch[i];
		word_read[i] = word(i, (t == ATTACHED -> spage[i] : OLD_PAGE))
	   }
	   /* The scheduler may write to the page here. */
	   atomic {
		lock[i] = false;
		if
		:: t == ATTACHED -> on_attached(i, word_read[i])
		:: t == GRANT && frame_epoch[i] != closed[i] ->
			if
			:: gate[i] == OPEN || gate[i] == SHUT && word_read[i] == frame_epoch[i] -> open_gate(i, frame_epoch[i], false)
			:: else
			fi
		:: t == REVOKE && frame_epoch[i] != closed[i] -> on_revoke(i, frame_epoch[i])
		:: else
		fi;
		t = 0; frame_epoch[i] = 0; word_read[i] = 0
	   }
	:: atomic { /* LEASE_EV_IDLE: others wait, and no call comes */
		gate[i] == OPEN && link[i] == LINKED && queued > 0 && !waiting[i] && !lock[i] && may_idle(i) ->
		drain(i)
	   }
#ifdef MOVES
	:: atomic { /* nvs_channel_filled */
		gate[i] == OPEN && own[i] == NO_WORD && !lock[i] ->
		own[i] = held[i]
	   }
#endif
#if PREEMPTIONS
	:: atomic { /* LEASE_EV_PREEMPTED, and the end of the drain as below */
		(gate[i] == DRAINING || gate[i] == QUIESCED) && link[i] != DETACHED && !lock[i] && preemptions < PREEMPTIONS ->
		preemptions++;
		off[i] = true;
		fenced[i] = false;
		if
		:: link[i] == ATTACHING -> gate[i] = DRAINED
		:: link[i] == LINKED -> release(i)
		fi
	   }
	:: atomic { /* LEASE_EV_FINISHED */
		off[i] && !lock[i] && may_finish(i) ->
		work[i] = false;
		channels_on(i)
	   }
#endif
	:: atomic { /* nvs_gate_quiesce */
		gate[i] == DRAINING && !in_flight[i] ->
		gate[i] = QUIESCED
	   }
	:: atomic { /* nvs_drain, then LEASE_EV_DRAINED */
		gate[i] == QUIESCED && !lock[i] ->
		work[i] = false;
		fenced[i] = false;
		if
		:: link[i] == ATTACHING -> gate[i] = DRAINED
		:: link[i] == LINKED -> release(i)
		:: link[i] == DETACHED -> forget_held(i)
		fi
	   }
	od
	} unless { dead[i] }
}

/* ---- the scheduler ---- */

#define live(i)   (c_epoch[i] != 0 && !c_fenced[i])
#define in_open(i) (live(i) && c_connected[i] && !c_revoked[i])
#if N == 2
#define nobody_live (!live(0) && !live(1))
#else
#define nobody_live (!live(0) && !live(1) && !live(2))
#endif

inline core_unqueue(i) {
	d_step {
		k = 0;
		m = 0;
		do
		:: k < queued ->
			if
			:: queue[k] != i -> queue[m] = queue[k]; m++
			:: else
			fi;
			k++
		:: else -> break
		od;
		queued = m;
		if
		:: next_client == i -> next_client = NOBODY; next_epoch = 0
		:: else
		fi;
		do
		:: m < N -> queue[m] = 0; m++
		:: else -> break
		od;
		k = 0;
		m = 0
	}
}

inline core_request(i) {
	d_step {
		k = 0;
		do
		:: k < queued && queue[k] != i -> k++
		:: else -> break
		od;
		if
		:: c_epoch[i] != 0 -> c_want[i] = true
		:: c_epoch[i] == 0 && k == queued -> queue[queued] = i; queued++
		:: else
		fi;
		k = 0
	}
}

inline core_end(i) {
	d_step { c_epoch[i] = 0; c_revoked[i] = false; c_fenced[i] = false; c_want[i] = false }
}

/* An epoch that occurs nowhere else. */
inline fresh(into) {
	d_step {
		into = 1;
		k = 0;
		do
		:: k < N ->
			if
			:: word(k, 0) == into || word(k, 1) == into || own[k] == into || held[k] == into ||
			   closed[k] == into || seen[k] == into || frame_epoch[k] == into || word_read[k] == into || c_epoch[k] == into || p_epoch[k] == into || next_client == k && next_epoch == into ||
			   down[k]??[GRANT, eval(into)] || down[k]??[REVOKE, eval(into)] ||
			   up[k]??[RELEASE, eval(into), _] || up[k]??[ATTACH, eval(into), _] ->
				into++;
				k = 0
			:: else -> k++
			fi
		:: else -> break
		od;
		k = 0;
		assert(into <= EPOCHS)
	}
}

#define recorded(i) (live(i) -> c_epoch[i] : (next_client == i -> next_epoch : 0))
#if N == 2
#define persisted (p_epoch[0] == recorded(0) && p_epoch[1] == recorded(1))
#define some_open (in_open(0) || in_open(1))
#else
#define persisted (p_epoch[0] == recorded(0) && p_epoch[1] == recorded(1) && p_epoch[2] == recorded(2))
#define some_open (in_open(0) || in_open(1) || in_open(2))
#endif

inline persist() {
	d_step {
#ifndef NO_PERSIST
		p_epoch[0] = recorded(0);
		p_epoch[1] = recorded(1);
#if N > 2
		p_epoch[2] = recorded(2)
#endif
#else
		skip
#endif
	}
}

inline send_down(i, type, epoch) {
	if
	:: conn[i] -> down[i]!type, epoch
	:: else
	fi
}

#define ready(i) (conn[i] && len(up[i]) > 0 || seof[i] || dead[i] && !c_gone[i])
#define after(i) ((i + 1) % N)
#if N == 2
#define none_before(i) (turn == i || !ready(after(i)))
#else
#define none_before(i) (turn == i || !ready(after(after(i))) && (turn == after(after(i)) || !ready(after(i))))
#endif
#define next(i) (ready(i) && none_before(i))

/*
 * A frame or the end of one client: the core's step, and its actions. Each action is a
 * step of its own, because a crash may come between any two.
 */
inline event(i) {
	if
	:: atomic { next(i) && conn[i] && up[i]?[ATTACH, _, _] ->
		turn = after(i);
		up[i]?ATTACH, e, want;
		c_connected[i] = true;
		c_want[i] = false;
		if
		:: e == 0 ->
			if
			:: c_epoch[i] != 0 -> core_end(i)
			:: else
			fi;
			if
			:: !want -> core_unqueue(i)
			:: else
			fi
		:: e != 0 && e == c_epoch[i] && !c_revoked[i] && !c_fenced[i] -> adopt = true
		:: e != 0 && e == c_epoch[i] && !c_revoked[i] && !c_fenced[i] && queued > 0 ->
			c_revoked[i] = true /* its quantum is over */
		:: e != 0 && c_epoch[i] != 0 && (e != c_epoch[i] || c_revoked[i] || c_fenced[i]) ->
			c_epoch[i] = e;
			c_revoked[i] = true
		:: e != 0 && c_epoch[i] == 0 -> /* a claim, early enough to count */
			core_unqueue(i);
			c_epoch[i] = e;
			c_revoked[i] = true
		fi;
		if
		:: want -> core_request(i)
		:: else
		fi;
		want = false
	   }
	   if
	   :: atomic { adopt -> word(i, spage[i]) = e; adopt = false }
	   :: else
	   fi;
	   atomic { send_down(i, ATTACHED, 0); e = 0; pick() }
	:: atomic { next(i) && conn[i] && up[i]?[REQUEST, _, _] ->
		turn = after(i);
		up[i]?REQUEST, _, _;
		core_request(i);
		pick()
	   }
	:: atomic { next(i) && conn[i] && up[i]?[RELEASE, _, _] ->
		turn = after(i);
		up[i]?RELEASE, e, want; /* the work wants the next grant */
		if
		:: e == c_epoch[i] ->
			shut = in_open(i);
			want = want || c_want[i];
			core_end(i);
			if
			:: want -> core_request(i)
			:: else
			fi
		:: else
		fi;
		e = 0;
		want = false;
		if
		:: shut
		:: else -> pick()
		fi
	   }
	   if
	   :: atomic { shut -> word(i, spage[i]) = CLOSED_WORD; shut = false; pick() }
	   :: else
	   fi
	:: atomic { next(i) && seof[i] -> /* Lost; its unread frames are lost too */
		turn = after(i);
		do
		:: up[i]?_, _, _
		:: len(up[i]) == 0 -> break
		od;
		shut = in_open(i);
		c_connected[i] = false;
		c_want[i] = false;
		if
		:: c_epoch[i] == 0 -> core_unqueue(i)
		:: else
		fi
	   }
	   atomic {
		if
		:: shut -> word(i, spage[i]) = CLOSED_WORD; shut = false
		:: else
		fi;
		seof[i] = false;
		pick()
	   }
	:: atomic { next(i) && dead[i] && !c_gone[i] ->
		turn = after(i);
		c_gone[i] = true;
		word(i, OLD_PAGE) = CLOSED_WORD;
		word(i, NEW_PAGE) = CLOSED_WORD;
		c_connected[i] = false;
		core_end(i);
		core_unqueue(i);
		pick()
	   }
	fi;
	grant()
}

/* Chooses the holder, if the GPU is free, and the next one, if the holder drains. */
inline pick() {
	if
	:: queued > 0 && nobody_live ->
		if
		:: next_client != NOBODY -> g = next_client; e = next_epoch
		:: else -> g = queue[0]; fresh(e)
		fi;
		core_unqueue(g);
		c_epoch[g] = e
	:: else
	fi;
#ifdef CHOSEN
	if
	:: some_open || queued == 0 -> next_client = NOBODY; next_epoch = 0
	:: !some_open && queued > 0 && next_client == NOBODY ->
		fresh(next_epoch);
		next_client = queue[0]
	:: else
	fi
#endif
}

/* The other actions: the grant, if there is one, and the record. */
inline grant() {
	if
	:: e != 0 ->
		if
		:: p_epoch[g] != e -> persist()
		:: else
		fi;
		word(g, spage[g]) = e;
		atomic { send_down(g, GRANT, e); g = 0; e = 0 }
	:: else
	fi;
	if
	:: atomic { !persisted -> persist() }
	:: else
	fi
}

/* The quantum is over. */
inline revoke(i) {
	atomic { in_open(i) && queued > 0 -> c_revoked[i] = true };
	word(i, spage[i]) = CLOSED_WORD;
	atomic { send_down(i, REVOKE, c_epoch[i]); pick() }
	grant()
}

/* The grace period is over. */
inline fence(i) {
	atomic { fences < FENCES && live(i) && (c_revoked[i] || !c_connected[i]) ->
		fences++;
		c_fenced[i] = true;
		c_revoked[i] = true;
		fenced[i] = true;
		pick()
	}
	grant()
}

proctype Scheduler() {
	byte e, g, k, m;
	bool want, adopt, shut;
start:
	{
	skip;
end_of_events:
	do
	:: event(0)
	:: event(1)
	:: revoke(0)
	:: revoke(1)
	:: fence(0)
	:: fence(1)
#if N > 2
	:: event(2)
	:: revoke(2)
	:: fence(2)
#endif
	od
	} unless { crash };
	d_step {
		crash = false;
		running = false;
		e = 0; g = 0; m = 0; turn = 0; queued = 0;
		want = false; adopt = false; shut = false;
		next_client = NOBODY; next_epoch = 0;
		k = 0;
		do
		:: k < N ->
			ceof[k] = ceof[k] || conn[k];
			seof[k] = false;
			conn[k] = false;
			do
			:: len(up[k]) > 0 -> up[k]?_, _, _
			:: else -> break
			od;
			queue[k] = 0;
			c_epoch[k] = 0;
			c_revoked[k] = false;
			c_fenced[k] = false;
			c_connected[k] = false;
			c_want[k] = false;
			k++
		:: else -> break
		od;
		k = 0
	};
	d_step {
		running = true;
		do
		:: k < N -> c_gone[k] = dead[k]; c_epoch[k] = (dead[k] -> 0 : p_epoch[k]); k++
		:: else -> break
		od;
		k = 0
	};
	goto start
}

/* ---- faults ---- */

inline cut(i) {
	atomic { cuts < CUTS && conn[i] -> cuts++; conn[i] = false; ceof[i] = true; seof[i] = true }
}

inline kill(i) {
	d_step { kills < KILLS && !dead[i] ->
		kills++;
		dead[i] = true;
		work[i] = false;
		fenced[i] = false;
		off[i] = false;
		lock[i] = false;
		in_flight[i] = false;
		waiting[i] = false;
		requested[i] = false;
		guessed[i] = false;
		own[i] = NO_WORD;
		link[i] = DETACHED;
		gate[i] = SHUT;
		held[i] = 0;
		closed[i] = 0;
		seen[i] = 0;
		frame_epoch[i] = 0;
		word_read[i] = 0;
		ceof[i] = false;
		do
		:: len(down[i]) > 0 -> down[i]?_, _
		:: else -> break
		od;
		seof[i] = seof[i] || conn[i];
		conn[i] = false
	}
}

proctype Env() {
	byte crashes, cuts, kills;
	do
	:: atomic { crashes < CRASHES && running && !crash -> crashes++; crash = true }
	:: cut(0)
	:: cut(1)
	:: kill(0)
	:: kill(1)
#if N > 2
	:: cut(2)
	:: kill(2)
#endif
	:: break
	od
}

init {
	atomic {
		run Scheduler();
		run App(0);
		run Client(0);
		run App(1);
		run Client(1);
#if N > 2
		run App(2);
		run Client(2);
#endif
		run Env()
	}
}

#ifdef WHO
ltl served { [] (waiting[WHO] -> <> (!waiting[WHO] || c_epoch[WHO] != 0 && !c_revoked[WHO])) }
#endif
