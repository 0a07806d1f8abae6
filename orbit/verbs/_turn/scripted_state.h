/* scripted_state.h: the fake device's objects, shared by scripted.c (making and destroying), scripted_rules.c (its
 * script), scripted_calls.c (turn.h), scripted_receives.c (receives, shared or not), scripted_events.c (contexts and
 * their asynchronous events) and scripted_execute.c (what a work request does). All of it is guarded by one lock, taken
 * at the outer calls, because turn_wait, turn_modify and pollers come without Python's lock.
 */
#ifndef ORBIT_SCRIPTED_STATE_H
#define ORBIT_SCRIPTED_STATE_H

#include "scripted.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    GID_ENTRIES = 16,
    RULES_MAX = 32,
    INLINE_MAX = 512,
    RXE_INLINE_MIN = 16, /* the room of one segment */
    KEY_INDICES = 1 << 16, /* fits the 24 bits that a key has for its index */
    TAGS = 256,
    FIRST_QPN = 17
};

enum kind {
    KIND_FREED,
    KIND_DEVICE,
    KIND_CONTEXT,
    KIND_PD,
    KIND_MR,
    KIND_MW,
    KIND_CHANNEL,
    KIND_CQ,
    KIND_SRQ,
    KIND_QP
};
enum qp_state { QPS_RESET, QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 6 };

/* ibv_wc_status and ibv_wc_opcode */
enum {
    WC_SUCCESS = 0,
    WC_LOC_LEN_ERR = 1,
    WC_LOC_QP_OP_ERR = 2,
    WC_LOC_PROT_ERR = 4,
    WC_WR_FLUSH_ERR = 5,
    WC_MW_BIND_ERR = 6,
    WC_REM_INV_REQ_ERR = 9,
    WC_REM_ACCESS_ERR = 10,
    WC_REM_OP_ERR = 11,
    WC_RETRY_EXC_ERR = 12,
    WC_RNR_RETRY_EXC_ERR = 13,
    WC_OP_RECV = 128,
    WC_OP_UNDEFINED = 0xdead /* of a failed completion, by the specification */
};

/* ibv_event_type */
enum {
    EVENT_CQ_ERR = 0,
    EVENT_QP_REQ_ERR = 2,
    EVENT_QP_ACCESS_ERR = 3,
    EVENT_PORT_ACTIVE = 9,
    EVENT_PORT_ERR = 10,
    EVENT_LID_CHANGE = 11,
    EVENT_SRQ_LIMIT_REACHED = 15,
    EVENT_QP_LAST_WQE_REACHED = 16,
    EVENT_GID_CHANGE = 18
};

enum { PARENTS_MAX = 4 };

struct object {
    enum kind kind, made_as; /* `kind` is KIND_FREED after fake_destroy */
    struct fabric *fabric;
    struct object *next;    /* all objects of the fabric */
    struct object *parents[PARENTS_MAX];
    uint32_t children;
    struct device *device;
    struct context *context; /* that it was made in; NULL for a device */
};

struct fabric {
    enum fake_mode mode;
    struct object *objects;
    uint32_t next_qpn;
};

struct rule {
    struct fake_rule is;
    uint32_t seen;
};

struct key_slot {
    struct object *owner; /* an mr or mw; NULL when free */
};

struct device {
    struct object object;
    uint8_t gids[GID_ENTRIES][16];
    uint32_t lid; /* not 0: an InfiniBand port */
    uint32_t pkey_count;
    bool active, windows, limit_at_arm, quiet;
    uint32_t rtr_delay_us;
    uint64_t message_max; /* bytes */
    uint32_t release_step, release_skip;
    struct rule rules[RULES_MAX];
    uint32_t rule_count;
    struct key_slot *keys;
    uint32_t next_key_index, tag_seed;
    struct fake_counters counters;
};

struct context {
    struct object object;
    int fd; /* a semaphore: one for each event */
    struct fake_event *events;
    uint32_t count, capacity;
};

struct pd {
    struct object object;
    uint8_t (*bound)[TAGS / 8]; /* tags that were ever bound here, by index */
};

struct mr {
    struct object object;
    struct pd *pd;
    uint64_t address, length;
    uint32_t access, key, windows;
};

struct mw {
    struct object object;
    struct pd *pd;
    uint32_t key;        /* what the device has */
    uint32_t object_key; /* what the caller's object says (turn_set_window_key) */
    bool bound;
    struct mr *mr;
    struct qp *qp;
    uint64_t address, length;
    uint32_t access;
};

struct channel {
    struct object object;
    int fd;
};

struct entry { /* of a completion queue */
    struct turn_wc wc;
    struct qp *qp;
    uint64_t sequence;
    bool of_send;
};

struct entries {
    struct entry *items;
    uint32_t count, capacity;
};

struct cq {
    struct object object;
    struct channel *channel;
    struct entries ready, held;
    uint32_t depth, pending_events;
    bool armed, overrun;
};

enum phase { PHASE_POSTED, PHASE_AWAITING, PHASE_DONE };

struct wqe {
    struct turn_wr wr;
    enum phase phase;
    uint32_t status, vendor_err;
    bool met_no_receive; /* counted already */
    bool hold, lose, duplicate, fail, delay;
    uint8_t payload[INLINE_MAX];
};

struct srq {
    struct object object;
    struct pd *pd;
    struct turn_recv *rq;
    uint32_t depth, limit; /* limit 0: not armed */
    uint64_t taken, posted;
};

struct qp {
    struct object object;
    struct pd *pd;
    struct cq *send_cq, *recv_cq;
    struct srq *srq; /* NULL: it has its own rq */
    enum qp_state state;
    uint32_t num;
    struct fake_qp_caps caps;
    struct turn_qp_attr attr;
    struct wqe *sq;
    struct turn_recv *rq;
    /* Sequence numbers: retired <= completed <= executed <= posted, and posted - retired <= send_depth. */
    uint64_t retired, completed, executed, posted;
    uint64_t rq_taken, rq_posted;
    bool advancing;
};

static inline void *live(uint64_t address, enum kind kind)
{
    struct object *object = (struct object *)(uintptr_t)address;

    return object && object->kind == kind ? object : NULL;
}

static inline bool is_rxe(const struct object *object)
{
    return object->fabric->mode == FAKE_RXE;
}

/* scripted_execute.c */
void fake_advance(struct qp *qp);
void fake_to_error(struct qp *qp);
void fake_complete(struct cq *cq, const struct entry *entry, const struct wqe *wqe);
void fake_enqueue(struct cq *cq, const struct entry *entry);
int fake_release_payloads(struct qp *qp);
void fake_unbind(struct mw *mw);
void fake_append(struct entries *to, const struct entry *entry);

/* scripted_receives.c */
struct pd *fake_recv_pd(const struct qp *qp);
struct turn_recv *fake_take_recv(struct qp *qp);
void fake_flush_recv(struct qp *qp);
void fake_wake_senders(const struct qp *qp);

/* scripted_events.c */
void fake_emit(struct object *about, uint32_t kind);
void fake_emit_port(struct device *device, uint32_t kind);
void fake_forget_events(struct object *about);

/* scripted_rules.c */
void fake_match_rules(struct device *device, uint32_t opcode, struct wqe *wqe);
struct fake_rule *fake_next_match(struct device *device, uint32_t opcode, uint32_t action);
void fake_step(struct device *device, enum fake_step step);

/* scripted.c */
void *fake_make(struct fabric *fabric, enum kind kind, size_t size);
void *fake_make_in(struct context *context, enum kind kind, size_t size);
void fake_adopt(struct object *child, int slot, struct object *parent);
uint32_t fake_granted(const struct object *object, uint32_t asked);
void fake_lock(void);
void fake_unlock(void);
void fake_end_qp(struct qp *qp);

/* scripted_calls.c */
struct qp *fake_peer_of(struct qp *qp);
void fake_signal(struct cq *cq);

#endif
