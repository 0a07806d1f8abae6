/* scripted.h: the making and the scripting of the fake device behind scripted.c.
 *
 * One fabric holds devices; queue pairs of different devices of one fabric reach each other by GID and queue pair
 * number. A device is opened as contexts, each with its asynchronous events; everything else is made in one. Everything
 * lives in this process and memory accesses are real copies at real addresses. Objects stay allocated until their
 * fabric is freed, so that a stale address is an error and never a crash.
 *
 * Every call keeps Python's lock except turn_wait and turn_modify (turn.h). Objects are uint64_t addresses; makers
 * return 0 and set *error, the others return 0 or -errno.
 */
#ifndef ORBIT_SCRIPTED_H
#define ORBIT_SCRIPTED_H

#include "turn.h"

enum fake_mode { FAKE_SPECIFICATION = 0, FAKE_RXE = 1 };

/* ibv_access_flags */
enum fake_access { FAKE_LOCAL_WRITE = 1, FAKE_REMOTE_WRITE = 2, FAKE_REMOTE_READ = 4, FAKE_MW_BIND = 16 };

/* What a rule does to the work requests it matches. */
enum fake_action {
    FAKE_HOLD = 1,      /* keep the completion back until released; later ones of the queue wait behind it */
    FAKE_LOSE = 2,      /* never deliver the completion */
    FAKE_DUPLICATE = 3, /* deliver it twice */
    FAKE_FAIL = 4,      /* do nothing, complete with `status` and `vendor_err`, queue pair to ERR */
    FAKE_DELAY = 5,     /* keep the payload of a READ or WRITE back until released */
    FAKE_REFUSE = 6     /* refuse the entry at post with errno `status`; `known` says whether the count is told */
};

/* Where a call of turn.h is, as seen by fake_device_release_at. */
enum fake_step {
    FAKE_BEFORE_POLL = 1,
    FAKE_AFTER_POLL = 2, /* the poll found nothing */
    FAKE_BEFORE_ARM = 3,
    FAKE_AFTER_ARM = 4,
    FAKE_BEFORE_SLEEP = 5, /* turn_wait */
    FAKE_BEFORE_DRAIN = 6, /* of a channel's events */
    FAKE_AFTER_DRAIN = 7
};

enum { FAKE_ANY = 255, FAKE_RECV = 64 }; /* `opcode` of a rule: a turn_opcode, or these */

/* Matches the next `count` requests of `opcode` after `skip` of them. 24 bytes. */
struct fake_rule {
    uint32_t action;
    uint32_t opcode;
    uint32_t skip;
    uint32_t count; /* UINT32_MAX: for ever */
    uint32_t status;
    uint32_t vendor_err_or_known;
};

/* One asynchronous event, 16 bytes. */
struct fake_event {
    uint32_t kind; /* ibv_event_type */
    uint32_t qp_num;
    uint64_t element; /* a cq, qp or srq, or a port number */
};

/* What a device has counted. Everything from `double_invalidates` on is a misuse. */
struct fake_counters {
    uint64_t sent_bytes; /* payload that left the device */
    uint64_t binds;
    uint64_t invalidates;
    uint64_t flushed;
    uint64_t receiver_not_ready; /* requests of peers that met no receive here */
    uint64_t double_invalidates; /* an rxe kernel panics */
    uint64_t destroyed_with_windows; /* an rxe kernel blocks 50 s and warns */
    uint64_t keys_reused; /* a key was bound a second time in one domain */
    uint64_t overruns; /* completions lost to a full queue */
    uint64_t live_objects;
};

struct fake_qp_caps {
    uint32_t send_depth;
    uint32_t recv_depth;
    uint32_t inline_bytes;
};

uint64_t fake_fabric_new(uint32_t mode);
/* Frees every object of the fabric. Nothing of it may be used afterwards. */
void fake_fabric_free(uint64_t fabric);
uint64_t fake_device_new(uint64_t fabric, int *error);
/* An all-zero gid clears the entry. */
int fake_device_set_gid(uint64_t device, uint32_t index, const uint8_t *gid);
int fake_device_set_port(uint64_t device, uint32_t active);
/* While quiet, events about the port are told to no context. */
int fake_device_set_quiet(uint64_t device, uint32_t quiet);
/* An InfiniBand port, which needs no global route to a port of its subnet. */
int fake_device_set_lid(uint64_t device, uint32_t lid);
/* Entries of the partition key table; INIT refuses an index behind it. */
int fake_device_set_pkeys(uint64_t device, uint32_t count);
int fake_device_set_windows(uint64_t device, uint32_t supported);
/* turn_modify to RTR sleeps this long, without Python's lock. */
int fake_device_set_rtr_delay(uint64_t device, uint32_t microseconds);
int fake_device_add_rule(uint64_t device, const struct fake_rule *rule);
int fake_device_clear_rules(uint64_t device);
/* Payloads first, then completions, each in order; how many. Rules stay. */
int fake_device_release(uint64_t device);
/* The same once, inside the next call that reaches `step` after `skip` others did. 0: not any more. */
int fake_device_release_at(uint64_t device, uint32_t step, uint32_t skip);
/* A limit that is armed while fewer receives are left raises its event now, not at the next receive. */
int fake_device_set_limit_at_arm(uint64_t device, uint32_t at_arm);
/* The longest message. Without a call: 1 GiB. By the specification a longer one fails; rxe sends it. */
int fake_device_set_message_max(uint64_t device, uint64_t bytes);
/* Raise an event: about an object, or about a port (of every context) when `about` is a device. */
int fake_raise_event(uint64_t about, uint32_t kind, uint32_t port);
int fake_device_counters(uint64_t device, struct fake_counters *out);
/* How many ways the device still has to these bytes: windows that are bound over them, receives that are posted, and
 * send work that names them and whose end, or that of later work, nobody has polled. */
int fake_device_reaches(uint64_t device, uint64_t start, uint64_t length);

uint64_t fake_context_new(uint64_t device, int *error);
/* Gets the oldest event and acknowledges it: 1, or 0 when there is none. */
int fake_next_event(uint64_t context, struct fake_event *out);
uint64_t fake_pd_new(uint64_t context, int *error);
uint64_t fake_mr_new(uint64_t pd, uint64_t address, uint64_t length, uint32_t access, int *error);
uint32_t fake_mr_lkey(uint64_t mr);
uint32_t fake_mr_rkey(uint64_t mr);
uint64_t fake_mw_new(uint64_t pd, int *error);
uint64_t fake_channel_new(uint64_t context, int *error);
uint64_t fake_cq_new(uint64_t context, uint32_t depth, uint64_t channel, int *error);
/* A shared receive queue; fake_srq_depth has what was granted. */
uint64_t fake_srq_new(uint64_t pd, uint32_t depth, int *error);
uint32_t fake_srq_depth(uint64_t srq);
/* One event once fewer than `limit` are left; 0 disarms. */
int fake_srq_arm(uint64_t srq, uint32_t limit);
/* `srq` 0: the queue pair has receives of its own. */
uint64_t fake_qp_new(uint64_t pd, uint64_t send_cq, uint64_t recv_cq, uint64_t srq, struct fake_qp_caps *caps,
                     int *error);
uint32_t fake_qp_num(uint64_t qp);
uint32_t fake_qp_state(uint64_t qp);
/* What the transitions up to now have set. */
int fake_qp_attributes(uint64_t qp, struct turn_qp_attr *out);
/* Any object. EBUSY with live children. */
int fake_destroy(uint64_t object);

#endif
