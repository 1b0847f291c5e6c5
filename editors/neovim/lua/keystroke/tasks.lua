-- Tasks: started by a command, listed in a buffer, their changes accepted whole or hunk by hunk.
--
-- The gateway runs the tasks; the server refuses a change while a file it touches has unsaved changes.

local keystroke = require('keystroke')

local M = { known = {}, order = {} }
local buffer -- of the list
local home -- the buffer whose server is used
local rows = {} -- line of the list -> task
local HELP = 'a accept · r reject · <CR> diff · s steer · x stop · u undo · R refresh · q close'

local function run(command, arguments, done) keystroke.run(home or vim.api.nvim_get_current_buf(), command, arguments, done) end

local function keep(task)
  if not M.known[task.id] then
    table.insert(M.order, 1, task.id)
  end
  M.known[task.id] = vim.tbl_extend('force', M.known[task.id] or {}, task)
  if task.question == vim.NIL then
    M.known[task.id].question = nil
  end
end

local function draw()
  if not buffer or not vim.api.nvim_buf_is_valid(buffer) then
    return
  end
  local lines = { HELP, '' }
  rows = {}
  for _, id in ipairs(M.order) do
    local task = M.known[id]
    local function line(text)
      lines[#lines + 1] = (text:gsub('\n', ' '))
      rows[#lines] = task
    end
    line(string.format('%-11s %s', task.status, task.instruction))
    local question = task.question
    if question then
      line('  ? ' .. (question.kind == 'command' and 'Run: ' .. question.command or question.text))
      for _, hunk in ipairs(question.hunks or {}) do
        line(string.format('    %s:%d', hunk.path, hunk.first))
        for _, sign in ipairs({ { '-', hunk.before }, { '+', hunk.after } }) do
          for row in vim.gsplit((sign[2]:gsub('\n$', '')), '\n', { plain = true }) do
            if sign[2] ~= '' then
              line('    ' .. sign[1] .. row)
            end
          end
        end
      end
    elseif task.line and task.line ~= '' then
      line('  ' .. task.line)
    end
  end
  if #M.order == 0 then
    lines[#lines + 1] = 'No tasks yet; start one with :KeystrokeTask.'
  end
  vim.bo[buffer].modifiable = true
  vim.api.nvim_buf_set_lines(buffer, 0, -1, false, lines)
  vim.bo[buffer].modifiable = false
end

local function act(task, what, fields)
  run('keystroke.taskAct', { task.id, what, fields or vim.empty_dict() }, function(now)
    keep(now)
    draw()
    vim.cmd('checktime')
  end)
end

local function answer(task, what, hunks)
  if task.question then
    act(task, what, { question = task.question.id, hunks = hunks })
  end
end

--- Ask hunk by hunk.
local function each(task)
  local question, taken = task.question, {}
  local function at(number)
    local hunk = question.hunks[number]
    if not hunk then
      answer(task, #taken > 0 and 'approve' or 'reject', #taken > 0 and taken or nil)
      return
    end
    vim.ui.select({ 'Take it', 'Leave it' }, { prompt = string.format('%s:%d  %s', hunk.path, hunk.first, vim.trim(hunk.after)) }, function(choice)
      if choice == 'Take it' then
        taken[#taken + 1] = hunk.number
      end
      if choice then
        at(number + 1)
      end
    end)
  end
  at(1)
end

function M.begun(task)
  home = home or vim.api.nvim_get_current_buf()
  keep(task)
  draw()
end

--- An event of a task.
function M.told(event)
  if event.task then
    keep(event.task)
  end
  local task = M.known[event.task_id]
  if not task then
    return
  end
  if event.type == 'task.began' then
    task.status = 'working'
  elseif event.type == 'task.doing' or event.type == 'task.noted' then
    task.line = event.line
  elseif event.type == 'task.asked' then
    task.status, task.question = 'asking', event.question
    vim.notify('Keystroke asks: ' .. event.question.text .. ' (:KeystrokeTasks)')
  elseif event.type == 'task.answered' then
    task.status, task.question = 'working', nil
  elseif event.type == 'task.ended' then
    vim.notify('Keystroke: ' .. task.status .. ': ' .. (task.line or ''))
    vim.cmd('checktime')
  end
  draw()
end

local function look()
  run('keystroke.tasks', {}, function(found)
    M.known, M.order = {}, {}
    for number = #found, 1, -1 do
      keep(found[number])
    end
    draw()
  end)
end

local function diff(task)
  run('keystroke.taskDiff', { task.id }, function(known)
    vim.cmd('new')
    local made = vim.api.nvim_get_current_buf()
    vim.bo[made].buftype, vim.bo[made].bufhidden, vim.bo[made].filetype = 'nofile', 'wipe', 'diff'
    vim.api.nvim_buf_set_lines(made, 0, -1, false, vim.split(known.diff ~= '' and known.diff or 'nothing was changed', '\n', { plain = true }))
    vim.bo[made].modifiable = false
  end)
end

local function accept(task)
  if task.status == 'proposed' then
    act(task, 'apply')
  elseif task.question and #(task.question.hunks or {}) > 1 then
    vim.ui.select({ 'All', 'One by one' }, { prompt = task.question.text }, function(choice)
      if choice == 'All' then
        answer(task, 'approve')
      elseif choice then
        each(task)
      end
    end)
  else
    answer(task, 'approve')
  end
end

--- Open the list in a window below.
function M.open()
  home = vim.api.nvim_get_current_buf()
  if not keystroke.client(home) then
    vim.notify('Keystroke: the language server is not running for this buffer; see :checkhealth keystroke', vim.log.levels.WARN)
    return
  end
  if not buffer or not vim.api.nvim_buf_is_valid(buffer) then
    buffer = vim.api.nvim_create_buf(false, true)
    vim.bo[buffer].filetype = 'keystroke-tasks'
    local function on(key, does)
      vim.keymap.set('n', key, function()
        local task = rows[vim.api.nvim_win_get_cursor(0)[1]]
        if task then
          does(task)
        end
      end, { buffer = buffer, nowait = true })
    end
    on('a', accept)
    on('r', function(task) answer(task, 'reject') end)
    on('<CR>', diff)
    on('x', function(task) act(task, 'cancel') end)
    on('u', function(task) act(task, 'undo') end)
    on('s', function(task)
      vim.ui.input({ prompt = 'New instruction: ' }, function(line)
        if line and line ~= '' then
          act(task, 'steer', { line = line })
        end
      end)
    end)
    vim.keymap.set('n', 'R', look, { buffer = buffer, nowait = true })
    vim.keymap.set('n', 'q', '<Cmd>close<CR>', { buffer = buffer, nowait = true })
  end
  vim.cmd('botright 12split')
  vim.api.nvim_win_set_buf(0, buffer)
  draw()
  look()
end

return M
