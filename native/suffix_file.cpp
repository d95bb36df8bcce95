// The file of a suffix store: header, then per problem its texts and sorted places, so that loading sorts nothing.
//
// Little endian: magic, format, slots, payload bytes, checksum of the payload; the payload as `save` writes it.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "suffix_store.h"

namespace paceline::suffix {
namespace {

constexpr char kMagic[8] = {'P', 'A', 'C', 'E', 'S', 'U', 'F', 'X'};
constexpr uint32_t kFormat = 1;
constexpr char kDamaged[] = "damaged; delete it (the index fills again by itself)";

struct Header {
  char magic[8];
  uint32_t format, slots;
  uint64_t payload_bytes, checksum;
};

struct RolloutHead {
  uint64_t tokens, sequence;
  int64_t version;
  uint64_t border;
};

class Checksum {
 public:
  void add(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    for (; bytes >= 8; at += 8, bytes -= 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      mix(word);
    }
    uint64_t word = bytes;
    std::memcpy(reinterpret_cast<char*>(&word) + 1, at, bytes);
    mix(word);
  }
  uint64_t value() const { return state_; }

 private:
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9fb21c651e98df25u;
    state_ ^= state_ >> 29;
  }
  uint64_t state_ = 0x243f6a8885a308d3u;
};

class File {
 public:
  File(const std::string& path, const char* mode) : path_(path), file_(std::fopen(path.c_str(), mode)) {
    if (!file_) fail(std::strerror(errno));
  }
  ~File() {
    if (file_) std::fclose(file_);
  }
  File(const File&) = delete;
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

  void write(const void* data, size_t bytes) {
    checksum_.add(data, bytes), count_ += bytes;
    if (bytes && std::fwrite(data, 1, bytes, file_) != bytes) fail(std::strerror(errno));
  }
  template <typename T>
  void put(const T& value) {
    write(&value, sizeof(T));
  }
  void close(const Header& header) {
    bool fine = std::fseek(file_, 0, SEEK_SET) == 0 && std::fwrite(&header, sizeof(header), 1, file_) == 1 &&
                std::fflush(file_) == 0 && fsync(fileno(file_)) == 0;
    int error = errno;
    fine = std::fclose(std::exchange(file_, nullptr)) == 0 && fine;
    if (!fine) fail(std::strerror(error));
  }

  void expect(uint64_t bytes) { left_ = bytes; }
  void read(void* data, size_t bytes) {
    if (bytes > left_ || (bytes && std::fread(data, 1, bytes, file_) != bytes))
      fail("shorter than it says; delete it (the index fills again by itself)");
    checksum_.add(data, bytes), left_ -= bytes;
  }
  template <typename T>
  T get() {
    T value;
    read(&value, sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> array(uint64_t size) {
    if (size > left_ / sizeof(T)) fail(kDamaged);
    std::vector<T> values(size);
    read(values.data(), size * sizeof(T));
    return values;
  }

  void restart() { checksum_ = Checksum(), count_ = 0; }
  uint64_t count() const { return count_; }
  uint64_t left() const { return left_; }
  uint64_t checksum() const { return checksum_.value(); }

 private:
  std::string path_;
  std::FILE* file_;
  Checksum checksum_;
  uint64_t count_ = 0, left_ = 0;
};

}  // namespace

void Store::save(const std::string& path) {
  std::vector<std::pair<uint64_t, std::shared_ptr<const Window>>> windows;
  int64_t version;
  uint64_t sequence;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    merge_all(lock);
    for (auto key = recent_.rbegin(); key != recent_.rend(); ++key)
      if (const auto& window = problems_.at(*key)->window) windows.emplace_back(*key, window);
    version = version_, sequence = sequence_;
  }
  std::string partial = path + "." + std::to_string(getpid()) + ".partial";
  try {
    File file(partial, "wb");
    Header header{{}, kFormat, static_cast<uint32_t>(options_.window_rollouts), 0, 0};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    file.put(header);
    file.restart();
    file.put(header.slots);
    file.put(version);
    file.put(sequence);
    file.put<uint64_t>(windows.size());
    for (const auto& [key, window] : windows) {
      file.put(key);
      file.put<uint64_t>(window->by_slot().size());
      for (const RolloutPtr& rollout : window->by_slot()) {
        file.put(rollout ? RolloutHead{rollout->tokens.size(), rollout->sequence, rollout->version, rollout->border}
                         : RolloutHead{});
        if (rollout) file.write(rollout->tokens.data(), rollout->tokens.size() * sizeof(Token));
      }
      file.put<uint64_t>(window->order().size());
      file.write(window->order().data(), window->order().size() * sizeof(uint32_t));
      file.write(window->shared().data(), window->shared().size());
    }
    header.payload_bytes = file.count(), header.checksum = file.checksum();
    file.close(header);
  } catch (...) {
    std::remove(partial.c_str());
    throw;
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    std::string what = path + ": " + std::strerror(errno);
    std::remove(partial.c_str());
    throw std::runtime_error(what);
  }
}

void Store::load(const std::string& path) {
  struct Stored {
    uint64_t key;
    std::vector<RolloutPtr> by_slot;
    std::vector<uint32_t> order;
    std::vector<uint8_t> shared;
  };
  File file(path, "rb");
  file.expect(sizeof(Header));
  Header header = file.get<Header>();
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) file.fail("not a suffix index");
  if (header.format != kFormat) file.fail("format " + std::to_string(header.format) + ", this build reads format 1");
  if (header.slots < 1 || header.slots > 4096) file.fail(kDamaged);
  file.restart();
  file.expect(header.payload_bytes);
  if (file.get<uint32_t>() != header.slots) file.fail(kDamaged);
  int64_t version = file.get<int64_t>();
  uint64_t sequence = file.get<uint64_t>(), count = file.get<uint64_t>();
  std::vector<Stored> stored;
  for (uint64_t i = 0; i < count; ++i) {
    Stored problem{file.get<uint64_t>(), {}, {}, {}};
    uint64_t slots = file.get<uint64_t>();
    if (slots > header.slots) file.fail(kDamaged);
    for (uint64_t slot = 0; slot < slots; ++slot) {
      RolloutHead head = file.get<RolloutHead>();
      problem.by_slot.push_back(nullptr);
      if (head.tokens == 0) continue;
      problem.by_slot.back() = std::make_shared<Rollout>(
          Rollout{file.array<Token>(head.tokens), static_cast<uint32_t>(head.border), head.version, head.sequence});
    }
    uint64_t places = file.get<uint64_t>();
    problem.order = file.array<uint32_t>(places);
    problem.shared = file.array<uint8_t>(places);
    stored.push_back(std::move(problem));
  }
  if (file.left() || file.checksum() != header.checksum)
    file.fail("damaged (checksum); delete it (the index fills again by itself)");

  std::vector<std::pair<uint64_t, std::shared_ptr<const Window>>> windows;
  for (Stored& problem : stored) {
    if (header.slots == options_.window_rollouts) {
      try {
        windows.emplace_back(problem.key, Window::restored(std::move(problem.by_slot), std::move(problem.order),
                                                           std::move(problem.shared), options_.window_rollouts));
      } catch (const std::invalid_argument& error) {
        file.fail(error.what());
      }
    } else {  // another window size: the texts count, and are sorted anew
      std::vector<RolloutPtr> texts;
      for (RolloutPtr& rollout : problem.by_slot)
        if (rollout && static_cast<int64_t>(rollout->tokens.size()) <= Window::place_tokens(options_.window_rollouts))
          texts.push_back(std::move(rollout));
      windows.emplace_back(problem.key, Window::merged(nullptr, kept(nullptr, texts), options_.window_rollouts));
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return jobs_.empty() && !busy_; });
  std::vector<ProblemPtr> before;
  for (auto& [key, problem] : problems_) before.push_back(problem);
  for (const ProblemPtr& problem : before) evict(problem);
  for (auto& [key, window] : windows) {
    ProblemPtr& problem = touch(key);
    problem->window = std::move(window);
    account(*problem);
  }
  version_ = version, sequence_ = std::max(sequence_, sequence);
  make_room();
}

}  // namespace paceline::suffix
