#include "suffix_store.h"

#include <cmath>
#include <stdexcept>

namespace paceline::suffix {
namespace {

constexpr int64_t kBorder = 4;     // prompt tokens before a rollout, as context of its first tokens
constexpr size_t kOverhead = 512;  // bytes of a problem without rollouts, at most
constexpr size_t kLeastBytes = 4096;
// A large window, or the pool, is merged when this fraction of it is pending: a merge passes over all of it.
constexpr int64_t kWindowParts = 64, kPoolParts = 16;
constexpr int kSilent = 1;  // an own match of at most this many tokens is weak (measured: docs/results/suffix_scope.md)
constexpr int64_t kSample = 16, kJudged = 256, kRest = 8;  // drafts, drafts, versions: see Gain
constexpr double kLeastGain = 1.01;
constexpr int kAges = 64;          // older rollouts get the weight of this age

uint64_t hash(const Token* tokens, int64_t count) {
  uint64_t state = 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i) {  // splitmix64's mixing
    state += static_cast<uint32_t>(tokens[i]) + 0x9e3779b97f4a7c15u;
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    state = (state ^ state >> 27) * 0x94d049bb133111ebu;
    state ^= state >> 31;
  }
  return state;
}

// The newest rollouts that fit into `limit`: how many of the window leave, and the first pending one that stays.
struct Kept {
  size_t leave, first;
};

Kept fit(const Window* window, const std::vector<RolloutPtr>& pending, size_t limit) {
  size_t bytes = kOverhead, first = pending.size(), leave = window ? window->rollouts().size() : 0;
  while (first > 0 && (bytes += Window::bytes_of(*pending[first - 1])) <= limit) --first;
  while (first == 0 && leave > 0 && (bytes += Window::bytes_of(*window->rollouts()[leave - 1])) <= limit) --leave;
  return {leave, first};
}

std::shared_ptr<const Window> merged(const Window* window, const std::vector<RolloutPtr>& pending, size_t limit) {
  Kept kept = fit(window, pending, limit);
  return Window::merged(window, kept.leave, {pending.begin() + static_cast<int64_t>(kept.first), pending.end()});
}

}  // namespace

Store::Store(const StoreOptions& options)
    : options_(options), lives_(options.handles), pool_(std::make_shared<Problem>()) {
  if (options.handles < 1 || std::min(options.window_bytes, options.max_bytes) < kLeastBytes ||
      (options.pool_bytes && options.pool_bytes < kLeastBytes))
    throw std::invalid_argument("suffix store: handles >= 1 and limits of at least 4096 bytes (pool: or 0)");
  options_.window_bytes = std::min({options.window_bytes, options.max_bytes, Window::kMostBytes});
  pool_->limit = std::min({options.pool_bytes, options.max_bytes, Window::kMostBytes});
  pool_->running = 1;
  for (int age = 0; age < kAges; ++age)
    weight_of_age_.push_back(static_cast<float>(std::pow(static_cast<double>(options.epoch_decay), age)));
}

Store::~Store() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (worker_.joinable()) worker_.join();
}

Store::Live& Store::live(int64_t handle) {
  if (handle < 0 || handle >= options_.handles) throw std::out_of_range("suffix store: handle out of range");
  return lives_[handle];
}

Store::ProblemPtr& Store::touch(uint64_t key) {
  ProblemPtr& problem = problems_[key];
  if (!problem) {
    problem = std::make_shared<Problem>();
    problem->key = key;
    problem->limit = options_.window_bytes;
    recent_.push_front(key);
    problem->recency = recent_.begin();
    account(*problem);
  } else {
    recent_.splice(recent_.begin(), recent_, problem->recency);
  }
  return problem;
}

void Store::forget_if_unused(const ProblemPtr& problem) {
  if (problem->running || problem->window || !problem->pending.empty() || problem->merging) return;
  auto found = problems_.find(problem->key);
  if (found == problems_.end() || found->second != problem) return;
  bytes_ -= problem->bytes;
  by_spare_.erase({problem->spare, problem->key});
  recent_.erase(problem->recency);
  problems_.erase(found);
}

void Store::begin(int64_t handle, const Token* prompt, int64_t tokens) {
  uint64_t key = hash(prompt, tokens);
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (request.problem) throw std::invalid_argument("suffix store: begin of a handle that has a request");
  request.problem = touch(key);
  ++request.problem->running;
  request.text.clear();
  request.text.append(prompt, tokens);
  request.prompt_tokens = tokens;
  join(request);
  make_room();
}

void Store::finish(int64_t handle, bool keep, int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (!request.problem) throw std::invalid_argument("suffix store: finish of a handle without a request");
  leave(request);
  ProblemPtr problem = std::move(request.problem);
  request.problem = nullptr;
  --problem->running;
  if (keep) publish(problem, request.text.data(), request.prompt_tokens, request.text.size(), version);
  forget_if_unused(problem);
}

void Store::join(Live& request) {
  request.draft.clear();
  request.judged = false;
  if (!options_.siblings) return;
  Problem& problem = *request.problem;
  if (!problem.group) problem.group = std::make_unique<GroupText>(options_.window_bytes);
  int64_t border = std::min(request.prompt_tokens, kBorder);
  request.sibling = problem.group->open(Origin::kRunningHere, request.text.data() + request.prompt_tokens - border,
                                        border);
}

void Store::leave(Live& request) {
  Problem& problem = *request.problem;
  if (!problem.group) return;
  problem.group->close(request.sibling);
  if (problem.group->opened() > static_cast<int64_t>(problem.elsewhere.size())) return;
  problem.group = nullptr;  // no request here follows the others any more
  problem.elsewhere.clear();
}

// The group learns what the request has gained, if there is another text.
void Store::follow(Live& request) {
  Problem& problem = *request.problem;
  if (!problem.group || problem.group->opened() < 2 || version_ < followed_from_) return;
  int64_t first = request.prompt_tokens - std::min(request.prompt_tokens, kBorder);
  int64_t known = first + problem.group->size(request.sibling);
  problem.group->append(request.sibling, request.text.data() + known, request.text.size() - known);
}

void Store::hear(int64_t handle, int64_t sibling, int64_t first, const Token* response, int64_t tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (!request.problem) throw std::invalid_argument("suffix store: a sibling of a handle without a request");
  Problem& problem = *request.problem;
  if (!problem.group) return;
  int64_t border = std::min(request.prompt_tokens, kBorder);
  auto [found, fresh] = problem.elsewhere.try_emplace(sibling, 0);
  if (fresh)
    found->second = problem.group->open(Origin::kRunningElsewhere,
                                        request.text.data() + request.prompt_tokens - border, border);
  int64_t known = problem.group->size(found->second) - border;
  if (first > known || first + tokens <= known) return;
  problem.group->append(found->second, response + (known - first), first + tokens - known);
}

void Store::count(Live& request, const Token* tokens, int64_t count) {
  auto accepted = [&](const std::vector<Drafted>& draft, auto&& each) {
    int32_t node = -1, nodes = static_cast<int32_t>(draft.size());
    for (int64_t i = 0; i < count; ++i) {
      int32_t next = node + 1;
      while (next < nodes && (draft[next].parent != node || draft[next].token != tokens[i])) ++next;
      if (next == nodes) return i;
      each(draft[next].origin);
      node = next;
    }
    return count;
  };
  int64_t with = accepted(request.draft, [this](Origin origin) { ++accepted_[static_cast<size_t>(origin)]; });
  if (request.judged) {
    int64_t without = accepted(request.without, [](Origin) {});
    for (Gain* gain : {&gain_, &judged_}) ++gain->drafts, gain->with += with, gain->without += without;
    judge();
  }
  request.judged = false;
  request.draft.clear();
}

void Store::judge() {
  if (judged_.drafts < kJudged) return;
  double with = static_cast<double>(judged_.drafts + judged_.with);
  if (with < kLeastGain * static_cast<double>(judged_.drafts + judged_.without)) followed_from_ = version_ + kRest;
  judged_ = {};
}

Gain Store::gain() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return gain_;
}

void Store::settle(int64_t handle, const Token* text, int64_t tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  Live& request = live(handle);
  if (!request.problem) throw std::invalid_argument("suffix store: the end of a handle without a request");
  int64_t known = request.text.size();
  if (tokens > known) count(request, text + known, tokens - known);
}

std::vector<int64_t> Store::accepted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return accepted_;
}

void Store::publish(const Token* prompt, int64_t prompt_tokens, const Token* response, int64_t tokens,
                    int64_t version) {
  uint64_t key = hash(prompt, prompt_tokens);
  std::vector<Token> text(prompt, prompt + prompt_tokens);
  text.insert(text.end(), response, response + tokens);
  std::lock_guard<std::mutex> lock(mutex_);
  ProblemPtr problem = touch(key);
  publish(problem, text.data(), prompt_tokens, static_cast<int64_t>(text.size()), version);
  forget_if_unused(problem);
}

void Store::publish(const ProblemPtr& problem, const Token* text, int64_t prompt_tokens, int64_t tokens,
                    int64_t version) {
  int64_t border = std::min(prompt_tokens, kBorder), first = prompt_tokens - border;
  int64_t size = std::min(tokens - first, Window::tokens_in(options_.window_bytes - kOverhead));
  if (size <= border) return;
  RolloutPtr rollout = std::make_shared<Rollout>(Rollout{{text + first, text + first + size},
                                                         static_cast<uint32_t>(border), version, sequence_++});
  add(problem, rollout);
  if (kOverhead + Window::bytes_of(*rollout) <= pool_->limit) add(pool_, rollout);
  make_room();
}

void Store::add(const ProblemPtr& problem, const RolloutPtr& rollout) {
  auto& pending = problem->pending;
  pending.push_back(rollout);
  if (size_t first = fit(nullptr, pending, problem->limit).first) {  // they alone fill it: the window is older
    pending.erase(pending.begin(), pending.begin() + static_cast<int64_t>(first));
    problem->window = nullptr;
    ++problem->generation;
  }
  account(*problem);
  if (problem->tokens > options_.inline_tokens && due(*problem)) merge_later(problem);
}

bool Store::due(const Problem& problem) const {
  bool pool = &problem == pool_.get();
  if (problem.pending.empty() || (!pool && problem.tokens <= options_.inline_tokens)) return !problem.pending.empty();
  return problem.pending_tokens * (pool ? kPoolParts : kWindowParts) >= problem.tokens;
}

void Store::append(int64_t requests, const int64_t* handles, const Token* tokens, const int64_t* offsets) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t r = 0; r < requests; ++r) {
    Live& request = live(handles[r]);
    if (!request.problem) throw std::invalid_argument("suffix store: append to a handle without a request");
    if (offsets[r + 1] < offsets[r]) throw std::invalid_argument("suffix store: offsets descend");
    if (offsets[r + 1] > offsets[r]) count(request, tokens + offsets[r], offsets[r + 1] - offsets[r]);
    request.text.append(tokens + offsets[r], offsets[r + 1] - offsets[r]);
    request.text.index();
  }
}

void Store::catch_up(int64_t requests, const int64_t* handles, const Token* history, int64_t stride,
                     const int64_t* lengths) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t r = 0; r < requests; ++r) {
    Live& request = live(handles[r]);
    int64_t known = request.text.size();
    if (!request.problem) throw std::invalid_argument("suffix store: a history of a handle without a request");
    if (lengths[r] < known) throw std::invalid_argument("suffix store: a history became shorter");
    const Token* gained = history + handles[r] * stride + known;
    if (lengths[r] > known) count(request, gained, lengths[r] - known);
    request.text.append(gained, lengths[r] - known);
  }
}

void Store::draft(const DraftRows& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  merge_if_due(*pool_);
  for (int64_t r = 0; r < rows.requests; ++r) {
    Live& request = live(rows.handles[r]);
    if (!request.problem) throw std::invalid_argument("suffix store: draft for a handle without a request");
    follow(request);
  }
  int64_t width = rows.shape.nodes;
  std::vector<Origin> origins(static_cast<size_t>(width));
  std::vector<int64_t> scratch(static_cast<size_t>(2 * width));
  for (int64_t r = 0; r < rows.requests; ++r) {
    Live& request = live(rows.handles[r]);
    Problem& problem = *request.problem;
    merge_if_due(problem);
    request.text.index();
    DraftShape shape = rows.shape;
    shape.nodes = static_cast<int>(std::clamp<int64_t>(rows.room[r], 0, shape.nodes));
    shape.depth = std::min(shape.depth, shape.nodes);
    Candidate own[kOwnCandidates], siblings[kSiblingCandidates], running[kOwnCandidates + kSiblingCandidates];
    Candidate window[kWindowCandidates], all[kCandidates + kWindowCandidates];
    Context context = request.text.context();
    int n = request.text.find(options_.own_weight, own), s = 0, m = 0;
    if (problem.group && problem.group->opened() > 1 && version_ >= followed_from_)
      s = problem.group->find(context, request.sibling, weight_of_age_[0], siblings);
    if (problem.window) m = problem.window->find(context, version_, weight_of_age_, 0, window);
    auto longer = [](const Candidate& a, const Candidate& b) { return a.length > b.length; };
    std::merge(own, own + n, siblings, siblings + s, running, longer);
    DraftOut out{rows.tokens + r * width, rows.parents + r * width, rows.probs ? rows.probs + r * width : nullptr,
                 origins.data()};
    auto drafted = [&](const Candidate* texts, int found, const DraftOut& out, std::vector<Drafted>& kept) {
      std::merge(texts, texts + found, window, window + m, all, longer);
      int count = found + m, longest = count ? all[0].length : 0;
      if (longest <= kSilent && pool_->window) {  // its longer matches come first; the vote uses them all
        Candidate pool[kWindowCandidates];
        int k = pool_->window->find(context, version_, weight_of_age_, longest, pool);
        for (int i = 0; i < k; ++i) pool[i].origin = Origin::kPool;
        std::copy_backward(all, all + count, all + k + count);
        std::copy(pool, pool + k, all);
        count = std::min(k + count, kCandidates);
      }
      int64_t nodes = suffix::draft(all, count, shape, out);
      kept.clear();
      for (int64_t i = 0; i < nodes; ++i)
        kept.push_back({static_cast<Token>(out.tokens[i]), static_cast<int32_t>(out.parents[i]), origins[i]});
      return nodes;
    };
    request.judged = options_.siblings && version_ >= followed_from_ && turn_++ % kSample == 0;
    if (request.judged) drafted(own, n, {scratch.data(), scratch.data() + width, nullptr, origins.data()}, request.without);
    rows.counts[r] = drafted(running, n + s, out, request.draft);
  }
}

void Store::set_version(int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  version_ = version;
}

// The holder of the lock merges small windows; the worker merges the others, one after another.
void Store::merge_if_due(Problem& problem) {
  if (problem.merging || problem.tokens > options_.inline_tokens || !due(problem)) return;
  merge_now(problem, problem.limit);
  make_room();
}

void Store::merge_now(Problem& problem, size_t limit) {
  problem.window = merged(problem.window.get(), problem.pending, limit);
  problem.pending.clear();
  account(problem);
}

void Store::merge_later(const ProblemPtr& problem) {
  if (problem->merging) return;  // the worker checks again when it has finished
  problem->merging = true;
  jobs_.push_back(problem);
  if (!worker_.joinable()) worker_ = std::thread(&Store::work, this);
  wake_.notify_one();
}

void Store::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    ProblemPtr problem = jobs_.front();
    jobs_.pop_front();
    busy_ = true;
    while (due(*problem) && !stop_) {
      std::shared_ptr<const Window> before = problem->window;
      std::vector<RolloutPtr> pending = problem->pending;
      uint64_t generation = problem->generation;
      lock.unlock();
      std::shared_ptr<const Window> after = merged(before.get(), pending, problem->limit);
      lock.lock();
      if (problem->generation != generation) continue;  // evicted meanwhile
      // No draft is in flight: drafts hold the lock. Later ones see the new window.
      problem->window.swap(after);
      uint64_t last = pending.back()->sequence;
      auto& rest = problem->pending;
      rest.erase(rest.begin(), std::find_if(rest.begin(), rest.end(),
                                            [last](const RolloutPtr& rollout) { return rollout->sequence > last; }));
      account(*problem);
      lock.unlock();
      before.reset(), after.reset(), pending.clear();  // freed without the lock
      lock.lock();
    }
    problem->merging = false;
    forget_if_unused(problem);
    make_room();
    busy_ = false;
    idle_.notify_all();
  }
}

void Store::flush() {
  std::unique_lock<std::mutex> lock(mutex_);
  merge_all(lock);
}

void Store::merge_all(std::unique_lock<std::mutex>& lock) {
  idle_.wait(lock, [this] { return jobs_.empty() && !busy_; });
  for (auto& [key, problem] : problems_)
    if (!problem->pending.empty()) merge_now(*problem, problem->limit);
  if (!pool_->pending.empty()) merge_now(*pool_, pool_->limit);
  make_room();
}

void Store::account(Problem& problem) {
  size_t bytes = kOverhead;
  problem.tokens = problem.pending_tokens = 0;
  if (problem.window) bytes += problem.window->bytes(), problem.tokens += problem.window->order().size();
  for (const RolloutPtr& rollout : problem.pending)
    bytes += Window::bytes_of(*rollout), problem.pending_tokens += rollout->places();
  problem.tokens += problem.pending_tokens;
  const Rollout* newest = !problem.pending.empty() ? problem.pending.back().get()
                          : problem.window && !problem.window->rollouts().empty()
                              ? problem.window->rollouts().back().get()
                              : nullptr;
  bytes_ += bytes - problem.bytes;
  problem.bytes = bytes;
  if (&problem == pool_.get()) return;
  by_spare_.erase({problem.spare, problem.key});
  problem.spare = newest ? bytes - kOverhead - Window::bytes_of(*newest) : 0;
  by_spare_.insert({problem.spare, problem.key});
}

// Drops the least valuable rollouts first. Among problems without running requests, the one with the most bytes beyond
// its newest rollout gives up its oldest, an eighth at a time, so that all shares become equal. Problems return in
// turns, so the least recently used one is the next to be requested. When each has only its newest rollout, whole
// problems leave, the least recently used first. Then the same for problems with running requests.
void Store::make_room() {
  for (bool running : {false, true}) {
    for (auto at = by_spare_.end(); bytes_ > options_.max_bytes && at != by_spare_.begin();) {
      auto [spare, key] = *--at;
      Problem& problem = *problems_.at(key);
      if ((problem.running > 0) != running) continue;
      if (!spare) break;
      trim(problem, problem.bytes - std::max<size_t>(spare / 8, 1));
      at = by_spare_.end();
    }
    for (auto at = recent_.end(); bytes_ > options_.max_bytes && at != recent_.begin();) {
      auto older = at--;
      ProblemPtr problem = problems_.at(*at);
      if ((problem->running > 0) != running || problem->bytes <= kOverhead) continue;
      evict(problem);  // may remove `at`
      at = older;
    }
  }
  if (bytes_ > options_.max_bytes) trim(*pool_, pool_->limit);  // its pending rollouts are too large
}

void Store::trim(Problem& problem, size_t limit) {
  ++problem.generation;
  merge_now(problem, limit);
}

void Store::evict(const ProblemPtr& problem) {
  problem->window = nullptr;
  problem->pending.clear();
  ++problem->generation;
  account(*problem);
  forget_if_unused(problem);
}

size_t Store::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

size_t Store::live_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = 0;
  for (const Live& request : lives_) bytes += request.text.bytes();
  for (const auto& [key, problem] : problems_) bytes += problem->group ? problem->group->bytes() : 0;
  return bytes;
}

size_t Store::problems() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return problems_.size();
}

size_t Store::window_tokens() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t tokens = 0;
  for (const auto& [key, problem] : problems_)
    if (problem->window) tokens += problem->window->order().size();
  return tokens;
}

size_t Store::pool_tokens() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return pool_->window ? pool_->window->order().size() : 0;
}

}  // namespace paceline::suffix
