// The suffix index of DAS 4.1: per problem a window over its recent rollouts, per running request its own text. The
// pool, one window over recent rollouts of all problems, is searched where these have only weak matches.
//
// Owns what is kept and for how long: sliding windows, memory limits, weights by version, files. Handles are numbers in
// [0, handles) that the caller gives to its running requests. Safe for several threads; a handle belongs to one.
#pragma once

#include <condition_variable>
#include <list>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "suffix_group.h"
#include "suffix_live.h"
#include "suffix_vote.h"
#include "suffix_window.h"

namespace paceline::suffix {

struct StoreOptions {
  int64_t handles;
  size_t window_bytes;      // per problem; its oldest rollouts leave
  size_t pool_bytes;        // of the pool; 0: none
  size_t max_bytes;         // of all windows and the pool: see make_room
  float epoch_decay;        // weight of a rollout per version of age
  float own_weight;         // of an own occurrence, against one in a rollout of the current version
  int64_t inline_tokens;    // the next draft merges windows up to this size, the worker larger ones
  bool siblings;            // drafts follow texts of the problem's other requests under way, too: see Gain
};

// What drafts gain by siblings under way: of every 16th draft, how much of it is accepted, and how much of the draft
// without them would have been. Below 1 % more tokens per verification they are not followed for the next versions.
struct Gain {
  int64_t drafts = 0, with = 0, without = 0;
};

// Drafts of R requests: row r of the outputs holds `nodes` places. `counts` [R].
struct DraftRows {
  int64_t requests;
  const int64_t* handles;
  const int64_t* room;  // [R]: upper limit of nodes and depth
  DraftShape shape;
  int64_t* tokens;
  int64_t* parents;
  float* probs;  // may be null
  int64_t* counts;
};

class Store {
 public:
  explicit Store(const StoreOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Requests of the same prompt belong to the same problem. The prompt is the start of the request's own text. Throws
  // std::out_of_range for a handle outside of [0, handles).
  void begin(int64_t handle, const Token* prompt, int64_t tokens);
  // The request leaves; with `keep` its response joins the problem's window as a rollout of `version`.
  void finish(int64_t handle, bool keep, int64_t version);
  // The request's whole text, as known at its end: counts the last draft's accepted tokens.
  void settle(int64_t handle, const Token* text, int64_t tokens);
  // Tokens [first, first + tokens) of the response of `request`, a sibling of the handle's request that another worker
  // samples. What is known already is left out, and what leaves a gap.
  void hear(int64_t handle, int64_t request, int64_t first, const Token* response, int64_t tokens);
  // A finished rollout from elsewhere.
  void publish(const Token* prompt, int64_t prompt_tokens, const Token* response, int64_t tokens, int64_t version);

  // offsets [R + 1]: request r gains tokens[offsets[r]:offsets[r + 1]].
  void append(int64_t requests, const int64_t* handles, const Token* tokens, const int64_t* offsets);
  // Handle h's text so far is a prefix of history[h * stride:][:length]: it gains the rest.
  void catch_up(int64_t requests, const int64_t* handles, const Token* history, int64_t stride, const int64_t* lengths);
  // Throws std::invalid_argument for a handle without a request, as all of the above do.
  void draft(const DraftRows& rows);

  void set_version(int64_t version);
  // Returns when every published rollout is in its window.
  void flush();

  // Replaces `path` at once, or throws std::runtime_error and leaves it. Flushes first.
  void save(const std::string& path);
  // Replaces the windows by those of a file. Throws std::runtime_error naming the file, and then changes nothing.
  void load(const std::string& path);

  // [kOrigins]: accepted tokens of drafts so far, by the origin of the longest match that proposed each.
  std::vector<int64_t> accepted() const;

  Gain gain() const;  // so far

  size_t bytes() const;       // windows, pool, and pending rollouts; shared texts count twice
  size_t live_bytes() const;  // texts of running requests, here and elsewhere
  size_t problems() const;
  size_t window_tokens() const;
  size_t pool_tokens() const;

 private:
  struct Problem {
    uint64_t key = 0;
    size_t limit = 0;  // bytes of its window
    std::shared_ptr<const Window> window;
    std::vector<RolloutPtr> pending;             // oldest first
    int64_t tokens = 0, pending_tokens = 0;      // of window and pending; of pending
    int64_t running = 0;
    std::unique_ptr<GroupText> group;                     // null: no request runs
    std::unordered_map<int64_t, int32_t> elsewhere;       // its texts of other workers, by request
    size_t bytes = 0, spare = 0;                 // spare: beyond the newest rollout
    bool merging = false;
    uint64_t generation = 0;  // counts evictions
    std::list<uint64_t>::iterator recency;
  };
  using ProblemPtr = std::shared_ptr<Problem>;
  struct Drafted {
    Token token;
    int32_t parent;
    Origin origin;
  };
  struct Live {
    ProblemPtr problem;  // null: no request
    LiveText text;
    int64_t prompt_tokens = 0;
    int32_t sibling = -1;  // its number in the problem's group
    std::vector<Drafted> draft;  // the last one, if what came of it is not known yet
    std::vector<Drafted> without;  // the same without siblings
    bool judged = false;           // ... which is one of the sample
  };

  Live& live(int64_t handle);
  ProblemPtr& touch(uint64_t key);
  void forget_if_unused(const ProblemPtr& problem);
  void join(Live& request);
  void leave(Live& request);
  void follow(Live& request);
  void count(Live& request, const Token* tokens, int64_t count);
  void judge();
  void publish(const ProblemPtr& problem, const Token* text, int64_t prompt_tokens, int64_t tokens, int64_t version);
  void add(const ProblemPtr& problem, const RolloutPtr& rollout);
  bool due(const Problem& problem) const;
  void merge_if_due(Problem& problem);
  void merge_now(Problem& problem, size_t limit);
  void merge_later(const ProblemPtr& problem);
  void account(Problem& problem);
  void make_room();
  void trim(Problem& problem, size_t limit);
  void evict(const ProblemPtr& problem);
  void work();
  void merge_all(std::unique_lock<std::mutex>& lock);

  StoreOptions options_;
  std::vector<float> weight_of_age_;
  mutable std::mutex mutex_;  // of everything below; not held while the worker merges or a file is written
  std::vector<Live> lives_;
  std::unordered_map<uint64_t, ProblemPtr> problems_;
  std::list<uint64_t> recent_;                       // keys, last used first
  std::set<std::pair<size_t, uint64_t>> by_spare_;  // and keys
  ProblemPtr pool_;  // holds every rollout of any problem; never leaves
  std::list<ProblemPtr> jobs_;
  std::condition_variable wake_, idle_;
  std::thread worker_;
  bool stop_ = false, busy_ = false;
  size_t bytes_ = 0;
  int64_t version_ = 0;
  uint64_t sequence_ = 0;
  Gain gain_, judged_;  // all; since siblings were followed again
  int64_t turn_ = 0, followed_from_ = 0;  // drafts; the version from which siblings are followed
  std::vector<int64_t> accepted_ = std::vector<int64_t>(kOrigins);
};

}  // namespace paceline::suffix
