/* turn.h: the hot calls of orbit's completion loop, and nothing else.
 *
 * Two libraries implement this header: native.c over libibverbs' own inline calls (it links against nothing of
 * rdma-core), and scripted.c, a fake device that executes the specification's checks in memory. No policy, no callback,
 * no allocation per operation and no error text: every function returns a count or -errno, and completions are handed
 * over as they are.
 *
 * Pointers arrive as uint64_t: native addresses (struct ibv_qp * ...) for native.c, the fake's own objects for
 * scripted.c. The caller keeps the objects alive. Calls marked GIL keep Python's lock, since they never block; calls
 * marked FREE are made without it.
 */
#ifndef ORBIT_TURN_H
#define ORBIT_TURN_H

#include <stdint.h>

#define TURN_ABI 4

enum turn_opcode {
    TURN_SEND = 0,
    TURN_SEND_WITH_INV = 1, /* rkey: the key to invalidate at the peer */
    TURN_READ = 2,
    TURN_WRITE = 3,
    TURN_BIND_WINDOW = 4, /* rkey: the new key; window, region, local_addr, length, access, perhaps remote_addr */
    TURN_LOCAL_INV = 5    /* rkey: the key to invalidate here */
};

enum turn_flags { TURN_SIGNALED = 1, TURN_FENCE = 2, TURN_INLINE = 4 };
enum turn_access { TURN_REMOTE_READ = 1, TURN_REMOTE_WRITE = 2 };
/* What a caller remembers of a completion queue: TURN_ARMED, or 0 when it is not armed or when that is not known. A call
 * that takes `*state` returns it with the number of events that it read: state | events << 1. */
enum turn_state { TURN_ARMED = 1 };
enum turn_accepted { TURN_RECEIVES = 0, TURN_SENDS = 1 };
#define TURN_KEY_NOW (UINT64_C(1) << 32)

/* One send work request, 64 bytes. At most one local segment; length 0 has none. */
struct turn_wr {
    uint64_t wr_id;
    uint64_t local_addr;  /* bind: start of the window */
    uint64_t remote_addr; /* READ, WRITE; bind: TURN_KEY_NOW | the key that the window has, or 0: what its object holds */
    uint64_t window;      /* bind: the window object */
    uint64_t region;      /* bind: the parent registration */
    uint64_t length;      /* bytes; bind: window length */
    uint32_t lkey;
    uint32_t rkey;
    uint16_t opcode;
    uint16_t flags;
    uint32_t access; /* bind: turn_access bits */
};

/* One receive work request, 24 bytes. */
struct turn_recv {
    uint64_t wr_id;
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
};

/* One completion, 40 bytes, fields as the provider gave them. `opcode` is the raw ibv_wc_opcode. `invalidated` is the
 * key of a receive with invalidate, 0 otherwise (providers disagree on the flag, so `wc_flags` is passed on raw). */
struct turn_wc {
    uint64_t wr_id;
    uint32_t status;
    uint32_t opcode;
    uint32_t byte_len;
    uint32_t qp_num;
    uint32_t vendor_err;
    uint32_t wc_flags;
    uint32_t invalidated;
    uint32_t reserved;
};

/* ibv_modify_qp as far as RC needs it, applied by turn_modify. 88 bytes. */
struct turn_qp_attr {
    uint32_t state; /* ibv_qp_state: 1 INIT, 2 RTR, 3 RTS, 6 ERR */
    uint32_t access; /* INIT: ibv_access_flags */
    uint32_t port;
    uint32_t pkey_index;
    uint32_t path_mtu; /* bytes: 256 ... 4096 */
    uint32_t dest_qpn;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t rd_atomic;      /* RTS */
    uint32_t max_dest_rd_atomic; /* RTR */
    uint32_t min_rnr_timer;
    uint32_t timeout;
    uint32_t retry_cnt;
    uint32_t rnr_retry;
    uint32_t is_global;
    uint32_t sgid_index;
    uint32_t hop_limit;
    uint32_t dlid;
    uint32_t service_level; /* RTR: of InfiniBand, 0 to 15 */
    uint32_t traffic_class; /* RTR: of the global route, so always of RoCE */
    uint8_t dgid[16];
};

/* GIL. Must equal TURN_ABI of the header that the caller was written against. */
int turn_abi(void);
/* GIL. sizeof the four structs above, packed as wr | recv << 8 | wc << 16 | qp_attr << 24. */
uint32_t turn_sizes(void);

/* GIL. Post `count` requests as one chain, in order. *accepted is how many the provider took; when it cannot be told,
 * UINT32_MAX: then the caller fences the queue pair. Returns 0 or -errno of the first one refused. */
int turn_post_send(uint64_t qp, const struct turn_wr *wrs, uint32_t count, uint32_t *accepted);
/* GIL. */
int turn_post_recv(uint64_t qp, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted);
/* GIL. The same for a shared receive queue. */
int turn_post_srq_recv(uint64_t srq, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted);
/* GIL. Up to `max` completions; returns how many, or -errno. */
int turn_poll(uint64_t cq, struct turn_wc *out, uint32_t max);
/* GIL. Ask for an event at the next completion (errors included). Poll again after it. */
int turn_arm(uint64_t cq);
/* GIL. Read all events of the (non-blocking) channel and acknowledge them on their completion queues; how many. */
int turn_drain_events(uint64_t channel, uint64_t cq);
/* GIL. File descriptor of a channel. */
int turn_channel_fd(uint64_t channel);
/* GIL. File descriptor of a context's asynchronous events. */
int turn_async_fd(uint64_t context);
/* GIL. The key in the window object, from which its next bind starts unless that says TURN_KEY_NOW; write it, read it. */
void turn_set_window_key(uint64_t window, uint32_t key);
uint32_t turn_window_key(uint64_t window);
/* FREE. modify_fn is ibv_modify_qp (native) or 0 (scripted). May block for a second towards an absent neighbour. */
int turn_modify(uint64_t modify_fn, uint64_t qp, const struct turn_qp_attr *attr);

/* ---- several steps in one crossing (wake.c, the same for both libraries) ----------------------------------------- */

/* GIL. Read the channel's events, poll, and where fewer than `max` were found: arm the queue unless it is armed, and poll
 * again. How many; -errno only when there were none: what keeps a call from arming meets the next one, too. After fewer
 * than `max`, armed in *state means that the next completion raises an event. */
int turn_wake(uint64_t channel, uint64_t cq, struct turn_wc *out, uint32_t max, uint32_t *state);
/* FREE. Poll for up to spin_us, then arm, poll again and sleep on the channel for up to nap_us; no channel: no sleep.
 * Stops as soon as there is a completion; returns how many were polled (0: none in time, the queue is left armed), or
 * -errno. Events that were read are counted and acknowledged. With a `state` it ends as turn_wake does; without one (NULL)
 * the queue counts as not armed, and what was found is all that is done. */
int turn_wait(uint64_t cq, uint64_t channel, uint32_t spin_us, uint32_t nap_us, struct turn_wc *out, uint32_t max,
              uint32_t *state);
/* GIL. Post the receives and then, if all were taken, the send requests of one queue pair; accepted[] as turn_post_send
 * says it, of the receives and of the send requests. -errno of the first one refused; else what turn_wake finds, 0 for
 * its errors; `max` 0 leaves that out. */
int turn_post(uint64_t qp, const struct turn_recv *recvs, uint32_t recv_count, const struct turn_wr *wrs,
              uint32_t count, uint32_t *accepted, uint64_t channel, uint64_t cq, struct turn_wc *out, uint32_t max,
              uint32_t *state);
/* What a library gives to these calls: told before each sleep of turn_wait. */
void turn_before_sleep(uint64_t channel);

/* ---- a native thread that polls one completion queue (poller.c, the same for both libraries) ------------------ */

/* GIL. Start polling `cq` into a ring of at least `entries` completions, which must hold the whole queue: a full ring
 * stops the polling until it is drained. `event_fd` (an eventfd, non-blocking) is written when the ring stops being
 * empty. After idle_us without a completion the thread sleeps nap_us between polls; until then it yields the processor.
 * nap_us 0: it never sleeps. The poller, or 0 and *error = -errno. */
uint64_t turn_poller_start(uint64_t cq, int event_fd, uint32_t entries, uint32_t idle_us, uint32_t nap_us, int *error);
/* GIL. Keep the thread on these processors from now on. 0 or -errno: -EINVAL when it may use none of them. */
int turn_poller_bind(uint64_t poller, const uint32_t *cpus, uint32_t count);
/* GIL. Up to `max` completions, oldest first; how many, or -errno of the poll that ended the polling once everything
 * before it was drained. Fewer than `max`: the ring was empty, and the next completion is announced on event_fd. One
 * caller at a time. */
int turn_poller_drain(uint64_t poller, struct turn_wc *out, uint32_t max);
/* FREE. Stop and join the thread: the queue is not touched afterwards. What is in the ring stays there. May be called
 * again. */
void turn_poller_stop(uint64_t poller);
/* GIL. A stopped poller; what is left in its ring goes with it. */
void turn_poller_free(uint64_t poller);

#endif
